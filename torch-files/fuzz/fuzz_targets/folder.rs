//! Whatever bytes the files of a folder of safetensors shards have, it is refused, or every tensor in it can be read,
//! and nothing else happens.
//!
//! The bytes are two lengths, an index of the first one, unless that is zero, a shard of the second, and another shard.
#![no_main]

use std::fs;
use std::path::PathBuf;

use libfuzzer_sys::fuzz_target;
use torch_files::{Error, TorchFile};

/// Tensors that take more bytes are not read.
const MOST: u64 = 1 << 20;

const NAMES: [&str; 3] = [
    "model.safetensors.index.json",
    "shard-00001-model-00001-of-00001.safetensors",
    "shard-00002-model-00001-of-00001.safetensors",
];

/// Writes the files. Returns `None` for too few bytes.
fn write(folder: &PathBuf, bytes: &[u8]) -> Option<()> {
    let (lengths, mut rest) = bytes.split_at_checked(4)?;
    let length = |at: usize| usize::from(u16::from_le_bytes([lengths[at], lengths[at + 1]]));
    fs::create_dir_all(folder).expect("a folder for temporary files");
    for (name, len) in NAMES.into_iter().zip([length(0), length(2), usize::MAX]) {
        let (content, after) = rest.split_at(len.min(rest.len()));
        rest = after;
        let path = folder.join(name);
        if content.is_empty() {
            drop(fs::remove_file(path));
        } else {
            fs::write(path, content).expect("a file of the folder");
        }
    }
    Some(())
}

fuzz_target!(|bytes: &[u8]| {
    let folder = std::env::temp_dir().join(format!("torch-files-fuzz-{}", std::process::id()));
    let Some(()) = write(&folder, bytes) else { return };
    let file = match TorchFile::open(&folder) {
        Ok(file) => file,
        Err(Error::Io { .. } | Error::Malformed { .. } | Error::TooMuch { .. }) => return,
        Err(error) => panic!("{error}"),
    };
    for (_, tensor) in file.tensors() {
        if tensor.size_in_bytes() <= MOST {
            let mut elements = vec![0; tensor.size_in_bytes() as usize];
            file.read(tensor, &mut elements).expect("a tensor of the folder is within its files");
        }
    }
    file.verify().expect("every tensor is within its file");
});

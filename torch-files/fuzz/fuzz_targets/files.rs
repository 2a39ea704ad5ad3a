//! Whatever bytes a file has, it is refused, or every tensor in it can be read, and nothing else happens.
//!
//! All formats can be in the bytes. When `cargo xtask fuzz` builds the target, checksums are computed, but not
//! compared.
#![no_main]

use libfuzzer_sys::fuzz_target;
use torch_files::TorchFile;

/// Tensors that take more bytes are not read: an expanded one can have a GiB.
const MOST: u64 = 1 << 20;

fuzz_target!(|bytes: &[u8]| {
    let Ok(mut file) = TorchFile::from_bytes(bytes.to_vec()) else { return };
    for (_, tensor) in file.tensors() {
        if tensor.size_in_bytes() <= MOST {
            let mut elements = vec![0; tensor.size_in_bytes() as usize];
            file.read(tensor, &mut elements).expect("a tensor of the file is within it");
        }
    }
    file.verify().expect("every record is within the file");
    drop(file.take_value().into_plain());
});

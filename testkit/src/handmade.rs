//! Files of checkpoints that are made by hand, as no save writes them. They are made here because some are large, and
//! this package is optimized.

use std::fmt::Write as _;
use std::io::{Cursor, Write as _};

use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

/// A checksum that is not there yet.
const BLANK: &str = "0000000000000000";

/// A safetensors file with this header and so many zeros after it.
pub fn safetensors(header: &str, data: usize) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &vec![0; data]].concat()
}

/// A manifest of this crate with these parts, for a file with so many tensors.
pub fn manifest(parts: &str, tensors: usize) -> String {
    let checksums = vec![format!("\"{BLANK}\""); tensors].join(",");
    format!(
        r#"{{"format":1,"writer":"","checksum":"{BLANK}","checksums":[{checksums}],"parts":{parts}}}"#
    )
}

/// The entry of a header that has this manifest.
pub fn metadata(manifest: &str) -> String {
    format!(r#""__metadata__":{{"tch_amp":{}}}"#, serde_json::json!(manifest))
}

/// A header of this crate with its checksum.
pub fn signed(header: &str) -> String {
    let own = format!("{:016x}", xxhash_rust::xxh3::xxh3_64(header.as_bytes()));
    header.replacen(BLANK, &own, 1)
}

/// An archive with these records.
pub fn archive(records: &[(&str, &[u8])]) -> Vec<u8> {
    zipped(records.iter().map(|(name, data)| ((*name).to_owned(), *data)))
}

/// An archive with this pickle and `count` empty records.
pub fn archive_of(pickle: &[u8], count: usize) -> Vec<u8> {
    let empty = (0..count).map(|record| (format!("a/data/{record}"), b"".as_slice()));
    zipped([("a/data.pkl".to_owned(), pickle)].into_iter().chain(empty))
}

fn zipped<'d>(records: impl Iterator<Item = (String, &'d [u8])>) -> Vec<u8> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    let options = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
    for (name, data) in records {
        zip.start_file(name, options).unwrap();
        zip.write_all(data).unwrap();
    }
    zip.finish().unwrap().into_inner()
}

/// A text in a pickle.
pub fn text(text: &str) -> Vec<u8> {
    [b"X".as_slice(), &(text.len() as u32).to_le_bytes(), text.as_bytes()].concat()
}

/// The numbers from 0 on in a pickle, each after this operation.
pub fn numbered(operation: u8, count: u32) -> Vec<u8> {
    (0..count).map(u32::to_le_bytes).flat_map(|[a, b, c, d]| [operation, a, b, c, d]).collect()
}

/// `unit` repeated up to about `bytes` bytes, with a running number for each `#`.
pub fn repeated(unit: &str, bytes: usize) -> String {
    let mut text = String::with_capacity(bytes + 2 * unit.len() + 20);
    for count in 0.. {
        for piece in unit.split_inclusive('#') {
            match piece.strip_suffix('#') {
                Some(piece) => write!(text, "{piece}{count:x}").unwrap(),
                None => text.push_str(piece),
            }
        }
        if text.len() >= bytes {
            break;
        }
    }
    text.truncate(text.trim_end_matches(',').len());
    text
}

//! The container of PyTorch's files: a zip archive whose records are not compressed.
//!
//! All records are in one folder. This crate writes `data.pkl`, `byteorder`, a `data/KEY` for each storage, and
//! `version`, each with a CRC-32. Uncompressed records can be read straight from their place in the file.

mod read;
mod write;

pub(crate) use read::{read, records};
pub(crate) use write::write;

/// The position and the checksum of a record in the file.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    pub offset: u64,
    pub len: u64,
    pub crc32: u32,
}

/// Whether a file that begins with these bytes is a zip archive.
pub(crate) fn is_zip(first_bytes: &[u8]) -> bool {
    first_bytes.starts_with(b"PK\x03\x04")
}

/// Splits a name into the folder and the rest. Returns `None` for a name that could lead outside of the folder.
fn split(name: &str) -> Option<(&str, &str)> {
    let plain = |part: &str| !matches!(part, "" | "." | "..");
    let fine = !name.contains(['\\', '\0']) && name.split('/').all(plain);
    name.split_once('/').filter(|_| fine)
}

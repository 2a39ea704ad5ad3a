//! Finding and reading the records of an archive.
//!
//! The directory is checked before a record is read: the number of records, their names, and that they neither overlap
//! nor reach beyond the end of the file.

use std::collections::BTreeMap;
use std::io::{self, Read, Seek, SeekFrom};

use ::zip::result::ZipError;
use ::zip::{CompressionMethod, ZipArchive};

use super::{Record, split};
use crate::checkpoint::malformed::{Malformed, shown};

impl From<ZipError> for Malformed {
    fn from(error: ZipError) -> Self {
        match error {
            ZipError::Io(error) if error.kind() != io::ErrorKind::UnexpectedEof => Self::Io(error),
            error => Self::Archive(error.to_string()),
        }
    }
}

/// Finds the records. Returns them by their names, without the folder that all of them are in.
pub(crate) fn records<R: Read + Seek>(
    mut file: R,
    max_records: usize,
) -> Result<(R, BTreeMap<String, Record>), Malformed> {
    check_count(&mut file, max_records)?;
    let mut archive = ZipArchive::new(file)?;
    check_limit(archive.len() as u64, max_records)?;
    let directory = archive.central_directory_start();
    let mut folder = None;
    let mut records = BTreeMap::new();
    let mut spans = Vec::new();
    for index in 0..archive.len() {
        let entry = archive.by_index_raw(index)?;
        let name = entry.name().to_owned();
        let refuse =
            |problem: &str| Malformed::Record { name: shown(&name), problem: problem.to_owned() };
        let Some((top, rest)) = split(&name) else {
            return Err(refuse("does not have a name of the form folder/name"));
        };
        if *folder.get_or_insert_with(|| top.to_owned()) != top {
            return Err(refuse("is not in the same folder as the others"));
        }
        let Some(offset) = entry.data_start() else {
            return Err(refuse("has no data"));
        };
        spans.push(entry.header_start()..offset.saturating_add(entry.compressed_size()));
        if entry.encrypted() {
            return Err(refuse("is encrypted"));
        }
        if entry.compression() != CompressionMethod::Stored {
            // TorchScript compresses its code, which this crate does not read.
            if rest.starts_with("code/") {
                continue;
            }
            return Err(refuse("is compressed; PyTorch stores records as they are"));
        }
        if entry.size() != entry.compressed_size() {
            return Err(refuse("is stored, but has two sizes"));
        }
        let (len, crc32) = (entry.size(), entry.crc32());
        let rest = rest.to_owned();
        records.insert(rest, Record { name, offset, len, crc32 });
    }
    spans.sort_unstable_by_key(|span| span.start);
    let ends = spans.iter().map(|span| span.end);
    let next = spans.iter().skip(1).map(|span| span.start).chain([directory]);
    if ends.zip(next).any(|(end, next)| end > next) {
        let problem = "its records overlap, or reach beyond its end";
        return Err(Malformed::Archive(problem.to_owned()));
    }
    let mut file = archive.into_inner();
    if lists_more(&mut file, directory, spans.len())? {
        return Err(Malformed::Archive("two of its records have the same name".to_owned()));
    }
    Ok((file, records))
}

/// Whether the directory of an archive lists more than `count` records. Of those with one name, the zip crate keeps one.
fn lists_more<R: Read + Seek>(file: &mut R, directory: u64, count: usize) -> io::Result<bool> {
    file.seek(SeekFrom::Start(directory))?;
    for _ in 0..count {
        let mut entry = [0; 46];
        file.read_exact(&mut entry)?;
        let lengths =
            [28, 30, 32].map(|at| u64::from(u16::from_le_bytes([entry[at], entry[at + 1]])));
        io::copy(&mut file.by_ref().take(lengths.iter().sum()), &mut io::sink())?;
    }
    let mut next = [0; 4];
    Ok(file.read(&mut next)? == 4 && next == *b"PK\x01\x02")
}

fn check_limit(count: u64, max_records: usize) -> Result<(), Malformed> {
    let limit = max_records as u64;
    if count > limit { Err(Malformed::TooMuch { what: "records", limit }) } else { Ok(()) }
}

/// Checks the number of records that an archive claims to have, before anything is allocated for them.
///
/// A zip64 archive has the number in its zip64 end record, right before the locator and the end record, where all
/// writers put them; it is an error if they are elsewhere. Other archives cannot claim more than 65535 records.
fn check_count<R: Read + Seek>(file: &mut R, max_records: usize) -> Result<(), Malformed> {
    const END: usize = 22;
    const LOCATOR: usize = 20;
    const END64: usize = 56;
    // The end record, its comment of up to 64 KiB, the few bytes more that the zip crate searches, and the two zip64
    // records.
    const TAIL: u64 = 22 + (1 << 16) + 4 + 20 + 56;
    let len = file.seek(SeekFrom::End(0))?;
    let start = len.saturating_sub(TAIL);
    file.seek(SeekFrom::Start(start))?;
    let mut tail = Vec::new();
    file.by_ref().take(TAIL).read_to_end(&mut tail)?;
    for end in END64 + LOCATOR..(tail.len() + 1).saturating_sub(END) {
        let locator = &tail[end - LOCATOR..end];
        if !tail[end..].starts_with(b"PK\x05\x06") || !locator.starts_with(b"PK\x06\x07") {
            continue;
        }
        let end64 = end - LOCATOR - END64;
        if u64_at(locator, 8) != Some(start + end64 as u64)
            || !tail[end64..].starts_with(b"PK\x06\x06")
        {
            return Err(Malformed::Archive("its zip64 end is not where it should be".to_owned()));
        }
        check_limit(u64_at(&tail, end64 + 32).unwrap_or(u64::MAX), max_records)?;
    }
    Ok(())
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().copied().map(u64::from_le_bytes)
}

/// Reads a record of at most `limit` bytes, and verifies its checksum.
pub(crate) fn read<R: Read + Seek>(
    file: &mut R,
    record: &Record,
    limit: u64,
) -> Result<Vec<u8>, Malformed> {
    if record.len > limit {
        return Err(
            record.refuse(format!("has {} bytes, but at most {limit} are allowed", record.len))
        );
    }
    file.seek(SeekFrom::Start(record.offset))?;
    let mut bytes = Vec::new();
    file.take(record.len).read_to_end(&mut bytes)?;
    if bytes.len() as u64 != record.len {
        return Err(record.refuse("ends too early".to_owned()));
    }
    // A fuzzer cannot guess checksums.
    if crc32fast::hash(&bytes) != record.crc32 && !cfg!(fuzzing) {
        return Err(record.refuse("is damaged: its checksum does not match".to_owned()));
    }
    Ok(bytes)
}

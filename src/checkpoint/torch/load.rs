//! Opening a file in PyTorch's format.

use std::collections::BTreeMap;
use std::io::{self, Read, Seek, SeekFrom};
use std::sync::Arc;

use super::{Opened, old, open};
use crate::checkpoint::CheckpointError;
use crate::checkpoint::archive::{Archive, Check, Region};
use crate::checkpoint::convert::Reader;
use crate::checkpoint::malformed::Malformed;
use crate::checkpoint::pickle::Limits;
use crate::checkpoint::source::Source;
use crate::checkpoint::zip::Record;
use crate::error::Result;

/// Reads the structure of a file. The storages are not read.
pub(crate) fn read(source: Arc<Source>) -> Result<Archive> {
    let opened = open(Cursor { source: &source, at: 0 }, &Limits::default());
    let Opened { root, storages, others } = opened.map_err(failed(&source))?;
    let region = |(name, record): (&String, &Record)| Region {
        name: name.clone(),
        offset: record.offset,
        len: record.len,
        check: Check::Crc32(record.crc32),
    };
    let regions = storages.iter().chain(&others).map(region).collect();
    let offsets: BTreeMap<_, _> =
        storages.into_iter().map(|(key, record)| (key, record.offset)).collect();
    let reader = Reader::new(&source, offsets);
    let parts = reader.parts(&root).map_err(|problem| source.damaged(problem))?;
    Ok(Archive { source, parts, regions })
}

/// Returns what a function that reads a file makes of an error.
fn failed(source: &Source) -> impl Fn(Malformed) -> CheckpointError {
    |error| match error {
        Malformed::Io(error) if error.kind() != io::ErrorKind::UnexpectedEof => {
            CheckpointError::io("read", source.path())(error)
        }
        error => source.damaged(error.to_string()),
    }
}

/// Reads the structure of a file that PyTorch before 1.6 wrote: pickles, and then the storages. It has no checksums.
pub(crate) fn read_old(source: Arc<Source>) -> Result<Archive> {
    let limits = Limits::default();
    let len = source.len().min(limits.max_pickle_bytes);
    let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
    source.read_at(0, &mut bytes)?;
    let (root, offsets) = old::read(&bytes, &source, &limits).map_err(failed(&source))?;
    drop(bytes);
    let reader = Reader::new(&source, offsets);
    let parts = reader.parts(&root).map_err(|problem| source.damaged(problem))?;
    Ok(Archive { source, parts, regions: Vec::new() })
}

/// A reader with a position in the file.
struct Cursor<'a> {
    source: &'a Source,
    at: u64,
}

impl Read for Cursor<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.source.len().saturating_sub(self.at)).unwrap_or(usize::MAX);
        let size = buffer.len().min(left);
        if size == 0 {
            return Ok(0);
        }
        self.source.read_at(self.at, &mut buffer[..size]).map_err(io::Error::other)?;
        self.at += size as u64;
        Ok(size)
    }
}

impl Seek for Cursor<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let reached = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::End(by) => self.source.len().checked_add_signed(by),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
        };
        self.at = reached.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        Ok(self.at)
    }
}

//! The file or the bytes that a checkpoint is read from.
//!
//! All reads go through a [`Source`], a file or bytes in memory, and end as an error with the path if the file is too
//! short.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::checkpoint::CheckpointError;
use crate::error::{Error, Result, sentence};

/// How many bytes are read or written at a time: few enough to stay in the cache of a core, and a multiple of the size
/// of every element.
pub(crate) const CHUNK: usize = 1 << 18;

/// An open file. Saves never modify a file in place, so what is read later is what was verified.
#[derive(Debug)]
pub(crate) struct Source {
    path: PathBuf,
    backing: Backing,
    len: u64,
}

#[derive(Debug)]
enum Backing {
    File(Mutex<File>),
    Memory(Memory),
}

/// Bytes whose debug form is only their number.
struct Memory(Vec<u8>);

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

impl Source {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let failed = CheckpointError::io("open", path);
        // Checked before the file is opened, because opening a pipe would block until there is a writer.
        if !fs::metadata(path).map_err(&failed)?.is_file() {
            let problem = "it is not a regular file";
            return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, problem)).into());
        }
        let file = File::open(path).map_err(&failed)?;
        let len = file.metadata().map_err(&failed)?.len();
        Ok(Self { path: path.to_owned(), backing: Backing::File(Mutex::new(file)), len })
    }

    pub(crate) fn in_memory(bytes: Vec<u8>) -> Self {
        let len = bytes.len() as u64;
        Self { path: PathBuf::from("(memory)"), backing: Backing::Memory(Memory(bytes)), len }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Fills the buffer with the bytes from `offset` on.
    pub(crate) fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        let read = match &self.backing {
            Backing::File(file) => {
                let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
                file.seek(SeekFrom::Start(offset)).and_then(|_| file.read_exact(buffer))
            }
            Backing::Memory(Memory(bytes)) => {
                let rest = usize::try_from(offset).ok().and_then(|offset| bytes.get(offset..));
                rest.unwrap_or_default().read_exact(buffer)
            }
        };
        read.map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => self.damaged("it ends too early").into(),
            _ => CheckpointError::io("read", &self.path)(error).into(),
        })
    }

    /// Calls `take` with `len` bytes from `offset` on, in order and in chunks.
    pub(crate) fn read_chunks<E: From<Error>>(
        &self,
        mut offset: u64,
        len: u64,
        take: &mut dyn FnMut(&[u8]) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let mut buffer = vec![0; CHUNK.min(usize::try_from(len).unwrap_or(CHUNK))];
        let end = offset + len;
        while offset < end {
            let size = buffer.len().min(usize::try_from(end - offset).unwrap_or(CHUNK));
            self.read_at(offset, &mut buffer[..size])?;
            take(&buffer[..size])?;
            offset += size as u64;
        }
        Ok(())
    }

    /// Makes an error of a problem, which may contain text from the file.
    pub(crate) fn damaged(&self, problem: impl Into<String>) -> CheckpointError {
        CheckpointError::Damaged { path: self.path.clone(), problem: sentence(&problem.into()) }
    }
}

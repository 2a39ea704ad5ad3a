//! The bytes that a file is read from, and their checksums.
//!
//! All reads go through a [`Source`], a file or bytes in memory, and end as an error with the path if the file is too
//! short.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use xxhash_rust::xxh3::Xxh3Default;

use crate::error::{Error, Malformed, Result};
use crate::text::shown;

/// How many bytes are read at a time where they only pass through: few enough to stay in the cache of a core, and a
/// multiple of the size of every element.
pub(crate) const CHUNK: usize = 1 << 18;

/// The number of the error that a process has too many open files, on Linux and macOS.
const EMFILE: i32 = 24;

/// An open file, or bytes. Files are replaced as a whole and never modified in place, so what is read later is what was
/// verified.
#[derive(Debug)]
pub(crate) struct Source {
    path: PathBuf,
    backing: Backing,
    len: u64,
}

#[derive(Debug)]
enum Backing {
    File(File),
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
        let failed = Error::io("open", path);
        // Checked before the file is opened, because opening a pipe would block until there is a writer.
        if !fs::metadata(path).map_err(&failed)?.is_file() {
            let problem = "it is not a regular file";
            return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, problem)));
        }
        let file = File::open(path).map_err(&failed)?;
        let len = file.metadata().map_err(&failed)?.len();
        Ok(Self { path: path.to_owned(), backing: Backing::File(file), len })
    }

    /// Opens one of so many files of a checkpoint.
    pub(crate) fn open_one_of(path: &Path, files: usize) -> Result<Self> {
        Self::open(path).map_err(|error| match error {
            Error::Io { action, path, cause }
                if cfg!(unix) && cause.raw_os_error() == Some(EMFILE) =>
            {
                let problem = format!(
                    "{cause}: the checkpoint has {files} files, which are open at the same time; raise the limit of \
                     the process with `ulimit -n`"
                );
                Error::Io { action, path, cause: io::Error::new(cause.kind(), problem) }
            }
            error => error,
        })
    }

    /// Makes a source without bytes, for what has no file of its own: a folder of several files. Errors show its path.
    pub(crate) fn nothing(shown: &Path) -> Self {
        Self { path: shown.to_owned(), ..Self::in_memory(Vec::new()) }
    }

    pub(crate) fn in_memory(bytes: Vec<u8>) -> Self {
        let len = bytes.len() as u64;
        Self { path: PathBuf::from("(memory)"), backing: Backing::Memory(Memory(bytes)), len }
    }

    /// Opens a file that errors are to call by another path, such as that of the folder that it is the index of.
    pub(crate) fn open_as(path: &Path, shown: &Path) -> Result<Self> {
        Ok(Self { path: shown.to_owned(), ..Self::open(path)? })
    }

    /// Returns all bytes of an index, of which there may be so many.
    pub(crate) fn all(&self, limit: u64) -> Result<Vec<u8>, Malformed> {
        if self.len > limit {
            return Err(Malformed::TooMuch { what: "bytes in its index", limit });
        }
        let mut bytes = vec![0; usize::try_from(self.len).unwrap_or(0)];
        self.read_at(0, &mut bytes).map_err(Malformed::Read)?;
        Ok(bytes)
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
            Backing::File(file) => read_exact_at(file, buffer, offset),
            Backing::Memory(Memory(bytes)) => {
                let rest = usize::try_from(offset).ok().and_then(|offset| bytes.get(offset..));
                rest.unwrap_or_default().read_exact(buffer)
            }
        };
        read.map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => self.malformed("it ends too early"),
            _ => Error::io("read", &self.path)(error),
        })
    }

    /// Calls `take` with `len` bytes from `offset` on, in order and in chunks.
    pub(crate) fn read_chunks(
        &self,
        mut offset: u64,
        len: u64,
        take: &mut dyn FnMut(&[u8]),
    ) -> Result<()> {
        let mut buffer = vec![0; CHUNK.min(usize::try_from(len).unwrap_or(CHUNK))];
        let end = offset.saturating_add(len);
        while offset < end {
            let size = buffer.len().min(usize::try_from(end - offset).unwrap_or(CHUNK));
            self.read_at(offset, &mut buffer[..size])?;
            take(&buffer[..size]);
            offset += size as u64;
        }
        Ok(())
    }

    /// Makes an error of a problem, which may contain text from the file.
    pub(crate) fn malformed(&self, problem: impl Into<String>) -> Error {
        Malformed::Whole(problem.into()).at(&self.path)
    }
}

#[cfg(unix)]
fn read_exact_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, buffer, offset)
}

/// Elsewhere a file has one position, which the threads take in turn.
#[cfg(not(unix))]
fn read_exact_at(mut file: &File, buffer: &mut [u8], offset: u64) -> io::Result<()> {
    static POSITION: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _mine = POSITION.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    file.seek(SeekFrom::Start(offset))?;
    file.read_exact(buffer)
}

/// How often an index is read again because another process has replaced it meanwhile.
const MAX_TRIES: usize = 10;

/// Opens an index, and reads what it names. If a file is missing, opens the index again: another process may have
/// replaced it, and removed the files of the old one. If it is still the same, the file is missing indeed.
///
/// Only an index for which `is_ours` returns true is replaced in this way; for another one the error is returned at
/// once.
pub(crate) fn newest<T>(
    open: &dyn Fn() -> Result<(Source, Vec<u8>)>,
    is_ours: &dyn Fn(&[u8]) -> bool,
    read: &mut dyn FnMut(Source, &[u8]) -> Result<T>,
) -> Result<T> {
    let mut before = None;
    let mut folder = PathBuf::new();
    for _ in 0..MAX_TRIES {
        let (source, bytes) = open()?;
        folder.clone_from(&source.path);
        match read(source, &bytes) {
            Err(Error::Io { path, cause, .. })
                if cause.kind() == io::ErrorKind::NotFound && is_ours(&bytes) =>
            {
                if before.as_ref() == Some(&bytes) {
                    let name = path.file_name().unwrap_or_default().to_string_lossy();
                    let problem = format!("its file `{}` is missing", shown(&name));
                    return Err(Malformed::Whole(problem).at(&folder));
                }
                before = Some(bytes);
            }
            read => return read,
        }
    }
    let problem = "it is replaced faster than it can be opened";
    Err(Error::io("open", &folder)(io::Error::other(problem)))
}

/// A reader with a position in a source, or in a part of one.
pub(crate) struct Cursor<'a> {
    source: &'a Source,
    /// Where the part begins, and how long it is.
    start: u64,
    len: u64,
    at: u64,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(source: &'a Source) -> Self {
        Self::within(source, 0, source.len())
    }

    /// Reads a part, which is within the source.
    pub(crate) fn within(source: &'a Source, start: u64, len: u64) -> Self {
        Self { source, start, len, at: 0 }
    }
}

impl Read for Cursor<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.len.saturating_sub(self.at)).unwrap_or(usize::MAX);
        let size = buffer.len().min(left);
        if size == 0 {
            return Ok(0);
        }
        let at = self.start + self.at;
        self.source.read_at(at, &mut buffer[..size]).map_err(io::Error::other)?;
        self.at += size as u64;
        Ok(size)
    }
}

impl Seek for Cursor<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let reached = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::End(by) => self.len.checked_add_signed(by),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
        };
        self.at = reached.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        Ok(self.at)
    }
}

/// A range of bytes with a checksum that the file itself has for it.
#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) name: String,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) sum: Sum,
}

/// A checksum of one of the kinds that files have.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Sum {
    Crc32(u32),
    Xxh3(Checksum),
}

impl Region {
    /// Reads the bytes once and compares their checksum.
    pub(crate) fn verify(&self, source: &Source) -> Result<()> {
        let read = |take: &mut dyn FnMut(&[u8])| source.read_chunks(self.offset, self.len, take);
        let is_intact = match self.sum {
            Sum::Crc32(sum) => {
                let mut hash = crc32fast::Hasher::new();
                read(&mut |bytes| hash.update(bytes))?;
                hash.finalize() == sum
            }
            Sum::Xxh3(sum) => {
                let mut hash = Xxh3Default::new();
                read(&mut |bytes| hash.update(bytes))?;
                Checksum(hash.digest()) == sum
            }
        };
        // A fuzzer cannot guess checksums.
        if is_intact || cfg!(fuzzing) {
            return Ok(());
        }
        Err(mismatch(source.path(), &self.name))
    }
}

/// Makes the error of a checksum that does not match.
pub(crate) fn mismatch(path: &Path, name: &str) -> Error {
    let problem = format!("the checksum of `{}` does not match", shown(name));
    let (path, entry) = (path.to_owned(), Some(name.to_owned()));
    Error::Malformed { path, entry, offset: None, problem }
}

/// A 64-bit XXH3 checksum. It is written as 16 hexadecimal digits, so that the length of a text with one does not
/// depend on it. `Write` to a [`ChecksumWriter`] computes one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checksum(pub u64);

impl Checksum {
    /// Computes the checksum of bytes that come in pieces.
    pub fn of<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut hash = Xxh3Default::new();
        pieces.into_iter().for_each(|bytes| hash.update(bytes));
        Self(hash.digest())
    }
}

impl Checksum {
    /// Reads only the spelling that this crate writes, because a checksum can be located by it in the text that it
    /// belongs to.
    pub(crate) fn parse(digits: &str) -> Option<Self> {
        let checksum = Self(u64::from_str_radix(digits, 16).ok()?);
        (checksum.to_string() == digits).then_some(checksum)
    }
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl Serialize for Checksum {
    fn serialize<S: serde::Serializer>(
        &self,
        serializer: S,
    ) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Checksum {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let digits = String::deserialize(deserializer)?;
        let problem = "a checksum that is not 16 hexadecimal digits";
        Self::parse(&digits).ok_or_else(|| D::Error::custom(problem))
    }
}

/// Computes the [`Checksum`] of what is written through it to another writer.
pub struct ChecksumWriter<W> {
    out: W,
    hash: Xxh3Default,
}

impl<W: Write> ChecksumWriter<W> {
    /// Makes one that writes to `out`.
    pub fn new(out: W) -> Self {
        Self { out, hash: Xxh3Default::new() }
    }

    /// Returns the checksum of all that was written.
    pub fn checksum(&self) -> Checksum {
        Checksum(self.hash.digest())
    }
}

impl<W: Write> Write for ChecksumWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.hash.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

//! Checkpoint files in PyTorch's format: the zip archives with a pickle that `torch.save` and `VarStore::save` write.
//!
//! The record `data.pkl` is a pickle of all values, and each record `data/KEY` holds the elements of one storage. `zip`
//! handles the records, `pickle` the values and `convert` the parts. `old` reads the format before PyTorch 1.6, which
//! has no records. A pickle alone, with numpy's arrays in it, is read as well.

mod old;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io::{self, BufWriter, Read, Seek, SeekFrom};
use std::sync::Arc;

use crate::atomic::Target;
use crate::checkpoint::CheckpointError;
use crate::checkpoint::archive::{Archive, Check, Region};
use crate::checkpoint::entry::{Failure, TensorEntry};
use crate::checkpoint::limits::Limits;
use crate::checkpoint::malformed::Malformed;
use crate::checkpoint::part::Part;
use crate::checkpoint::pickle::{self, Bytes, First};
use crate::checkpoint::source::Source;
use crate::checkpoint::torch_layout::{Layout, Reader, StorageSource};
use crate::checkpoint::value::{Text, Value};
use crate::checkpoint::zip::{self, ZipRecord};
use crate::error::{Result, shown, unsaveable};

pub(crate) use old::is_old;

/// The names of two records.
const PICKLE: &str = "data.pkl";
const BYTE_ORDER: &str = "byteorder";

/// An upper bound of the number of records besides one for each storage.
const OTHER_RECORDS: usize = 8;

/// From how many tensors on it is these that take the most values.
const MANY_TENSORS: usize = 10_000;

/// The content of a file that is to be written.
#[derive(Debug)]
pub(crate) struct Pickled<'a> {
    pickle: Vec<u8>,
    /// The tensor of each storage, in the order of their keys.
    storages: Vec<StorageSource<'a>>,
}

/// Lays out the parts, the parameters of optimizers by names or by numbers. Returns an error for a part that cannot be
/// represented in Python or could not be loaded again.
pub(crate) fn plan(parts: &BTreeMap<String, Part>, by_name: bool) -> Result<Pickled<'_>> {
    planned(Layout::new(parts, by_name)?)
}

/// Lays out the tensors of a model without anything else, as [`plan`] does.
pub(crate) fn plan_of_weights(tensors: &BTreeMap<String, TensorEntry>) -> Result<Pickled<'_>> {
    planned(Layout::of_weights(tensors))
}

fn planned(layout: Layout<'_>) -> Result<Pickled<'_>> {
    let lengths = lengths(&layout.storages);
    let limits = Limits::default();
    let most = limits.max_records - OTHER_RECORDS;
    let pickle = if lengths.len() > most {
        Err(format!("more than {most} tensors are too many"))
    } else {
        pickle::write(&layout.root, &lengths, &limits)
    };
    let pickle = pickle.map_err(|problem| {
        let advice = match layout.storages.len() {
            0..=MANY_TENSORS => "save long values as tensors",
            _ => "save it as safetensors, which holds more tensors",
        };
        unsaveable("the checkpoint", format!("{problem}; {advice}"))
    })?;
    Ok(Pickled { pickle, storages: layout.storages })
}

/// Returns the key and the size in bytes of each storage.
fn lengths(storages: &[StorageSource<'_>]) -> Vec<(String, u64)> {
    let key =
        |(index, stored): (usize, &StorageSource<'_>)| (index.to_string(), stored.len() as u64);
    storages.iter().enumerate().map(key).collect()
}

/// Writes the archive. `note` keeps a failure that is not an I/O error.
pub(crate) fn write(
    plan: &Pickled<'_>,
    out: &mut dyn Target,
    note: &mut dyn FnMut(Failure) -> io::Error,
) -> io::Result<()> {
    let Pickled { pickle, storages } = plan;
    let out = zip::write(BufWriter::new(out), pickle, &lengths(storages), &mut |index, out| {
        let read = storages[index].read(&mut |bytes| Ok(out.write_all(bytes)?));
        read.map_err(&mut *note)
    })?;
    out.into_inner().map_err(io::IntoInnerError::into_error)?.flush()
}

/// Reads the structure of a file. The storages are not read.
pub(crate) fn read(source: Arc<Source>) -> Result<Archive> {
    let opened = open(Cursor { source: &source, at: 0 }, &Limits::default());
    let Opened { root, arrays, storages, others } = opened.map_err(failed(&source))?;
    let region = |name: &str, record: &ZipRecord| Region {
        name: name.to_owned(),
        offset: record.offset,
        len: record.len,
        check: Check::Crc32(record.crc32),
    };
    let mut regions: Vec<_> = storages.iter().map(|(key, record)| region(key, record)).collect();
    regions.extend(others.iter().map(|(name, record)| region(name, record)));
    let pickle = others.get(PICKLE).map_or(0, |record| record.offset);
    let storages = storages.into_iter().map(|(key, record)| (key, record.offset));
    archive(source, root, storages, arrays, pickle, regions)
}

/// Reads the structure of a file that PyTorch before 1.6 wrote: pickles, and then the storages. It has no checksums.
pub(crate) fn read_old(source: Arc<Source>) -> Result<Archive> {
    let limits = Limits::default();
    let len = source.len().min(limits.max_pickle_bytes);
    let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
    source.read_at(0, &mut bytes)?;
    if !old::is_marked(&bytes) {
        drop(bytes);
        return read_plain(source, limits);
    }
    let opened = old::read(&bytes, &source, &limits).map_err(failed(&source))?;
    drop(bytes);
    let old::Opened { root, storages, arrays, pickle } = opened;
    archive(source, root, storages, arrays, pickle, Vec::new())
}

/// Reads a pickle that is a file of its own, as Python's `pickle` writes it. It has no checksums. Numpy's arrays are in
/// the pickle itself, which may therefore be as large as any file.
fn read_plain(source: Arc<Source>, limits: Limits) -> Result<Archive> {
    let len = usize::try_from(source.len()).unwrap_or(usize::MAX);
    let mut bytes = Vec::new();
    if bytes.try_reserve_exact(len).is_err() {
        return Err(source.damaged("it is a pickle that is larger than the memory").into());
    }
    bytes.resize(len, 0);
    source.read_at(0, &mut bytes)?;
    let limits = Limits { max_pickle_bytes: limits.max_pickle_bytes.max(source.len()), ..limits };
    let first = pickle::read_first(&bytes, &limits).map_err(failed(&source))?;
    let First { root, len, storages, arrays } = first;
    if len != bytes.len() || !storages.is_empty() {
        let problem = "it is a plain pickle, but more bytes follow its end, or it refers to storages that only a file of \
                       torch.save has";
        return Err(source.damaged(problem).into());
    }
    drop(bytes);
    archive(source, root, [], arrays, 0, Vec::new())
}

/// Makes the parts of a saved object, given the positions of its storages and that of the pickle, in which numpy's
/// arrays are.
fn archive(
    source: Arc<Source>,
    root: Value,
    storages: impl IntoIterator<Item = (Text, u64)>,
    arrays: BTreeMap<Text, Bytes>,
    pickle: u64,
    regions: Vec<Region>,
) -> Result<Archive> {
    let storages = storages.into_iter().map(|(key, start)| (key, (Arc::clone(&source), start)));
    let mut storages: BTreeMap<_, _> = storages.collect();
    for (key, bytes) in arrays {
        let place = match bytes {
            Bytes::Here(range) => (Arc::clone(&source), pickle + range.start as u64),
            Bytes::Made(made) => (made, 0),
        };
        if storages.insert(key, place).is_some() {
            return Err(source.damaged("a storage has the name of a numpy array").into());
        }
    }
    let parts = Reader::new(storages).parts(root);
    let parts = parts.map_err(|problem| source.damaged(problem))?;
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

/// The content of a file.
#[derive(Debug)]
struct Opened {
    /// The saved object.
    root: Value,
    /// The content of the numpy arrays in it.
    arrays: BTreeMap<Text, Bytes>,
    /// The records of the storages, by key.
    storages: BTreeMap<Text, ZipRecord>,
    /// The other records by name, except compressed ones such as the code in a TorchScript archive.
    others: BTreeMap<String, ZipRecord>,
}

/// Reads everything except the storages, whose checksums the caller must verify.
fn open<R: Read + Seek>(mut file: R, limits: &Limits) -> std::result::Result<Opened, Malformed> {
    let mut records = zip::records(&mut file, limits.max_records)?;
    if let Some(record) = records.get(BYTE_ORDER) {
        let order = zip::read(&mut file, BYTE_ORDER, record, 16)?;
        if order != b"little" {
            let order = shown(&String::from_utf8_lossy(&order));
            let problem = format!("says {order}, but only little is supported");
            return Err(Malformed::Record { name: BYTE_ORDER.to_owned(), problem });
        }
    }
    let Some(pickle) = records.get(PICKLE) else {
        return Err(Malformed::Archive(format!("it has no {PICKLE}")));
    };
    let bytes = zip::read(&mut file, PICKLE, pickle, limits.max_pickle_bytes)?;
    let mut storages = BTreeMap::new();
    let mut others = BTreeMap::new();
    // A storage is found by its key, in the folder `data`.
    while let Some((name, record)) = records.pop_first() {
        match name.strip_prefix("data/") {
            Some(key) => drop(storages.insert(Text::from(key), record)),
            None => drop(others.insert(name, record)),
        }
    }
    let read = pickle::read(&bytes, &|key| storages.get(key).map(|record| record.len), limits)?;
    let First { root, arrays, .. } = read;
    Ok(Opened { root, arrays, storages, others })
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

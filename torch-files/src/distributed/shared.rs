//! Saving a folder by several processes.

use std::collections::{BTreeMap, HashSet};
use std::path::{self, Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

use serde::{Deserialize, Serialize};

use super::files::{make, next_number, remove_others};
use super::{INDEX, name_of, trailer, unwritable};
use crate::atomic::{self, Replaced};
use crate::error::{Error, Result};
use crate::limits::Limits;
use crate::pickle::{self, Entry, Kind};

/// A save of one checkpoint by several processes, whose folder all of them reach.
///
/// The process of rank 0 begins it and sends its number to the others, which join it. Each saves its share with
/// [`FolderWriter::save_share`](super::FolderWriter::save_share) and sends that to rank 0, which finishes the save. Nobody reads a new folder before it is
/// finished.
///
/// # Examples
///
/// ```
/// use torch_files::distributed::{FolderWriter, SharedSave};
/// use torch_files::{Dtype, Limits, TensorRef, TorchFile, Value};
///
/// # let folder = std::env::temp_dir().join(format!("torch-files-doc-shared-{}", std::process::id()));
/// let tensor = |name: &str| TensorRef::contiguous(name, Dtype::Uint8, vec![1]).into();
/// let begun = SharedSave::begin(&folder)?;
/// let mut shares = Vec::new();
/// for rank in 0..2u8 {
///     // In a process of its own: all lay out the same, and each keeps what it saves.
///     let save = SharedSave::join(&folder)?.with_number(begun.number());
///     let value = Value::Dict(vec![("a".into(), tensor("0")), ("b".into(), tensor("1"))]);
///     let mut writer = FolderWriter::new(&value, [vec![0], vec![1]], &Limits::default())?;
///     writer.retain(|bytes| bytes.is_some_and(|bytes| bytes[0] == rank));
///     shares.push(writer.save_share(&save, rank.into())?);
/// }
/// let _durable = begun.finish(shares, &Limits::default())?;
/// assert_eq!(TorchFile::open(&folder)?.tensors().len(), 2);
/// # std::fs::remove_dir_all(folder)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct SharedSave {
    folder: PathBuf,
    /// That of the files of all processes, which no file in the folder has yet.
    number: u64,
    is_new: bool,
}

/// What one of several processes has saved: its part of the index, to be sent to rank 0.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Share {
    pub(super) entries: Vec<Entry>,
}

impl SharedSave {
    /// Begins a save to a folder, which is created unless it exists. A checkpoint that is there stays until
    /// [`finish`](Self::finish).
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the folder cannot be created, is a file, or has other files and no index.
    pub fn begin(folder: impl AsRef<Path>) -> Result<Self> {
        let mut begun = Self::join(folder)?;
        begun.is_new = make(&begun.folder)?;
        begun.number = next_number(&begun.folder).inspect_err(|_| begun.remove_folder())?;
        Ok(begun)
    }

    /// Joins a save that the process of rank 0 has begun, under the path that the folder has here. Nothing is looked for
    /// in the folder. Its number, which is still to come, is 0 until [`with_number`](Self::with_number).
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the path is empty, or relative to a folder that does not exist any more.
    pub fn join(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = path::absolute(folder.as_ref()).map_err(Error::io("save", folder.as_ref()))?;
        Ok(Self { folder, number: 0, is_new: false })
    }

    /// Returns the same save with the number that the process of rank 0 has sent, for one that has joined it.
    #[must_use]
    pub fn with_number(self, number: u64) -> Self {
        Self { number, ..self }
    }

    /// Returns the number, which the other processes need.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Returns the path of the file that has the share of a rank.
    pub fn file_of(&self, rank: u64) -> PathBuf {
        self.folder.join(name_of(rank, self.number))
    }

    /// Completes the save with the index of all shares, and removes the files that only an old index names. An empty
    /// dict is left out where another share has what is in it.
    ///
    /// # Errors
    ///
    /// Those of [`atomic::replace`]; [`Error::Unwritable`] if two shares have an entry of the same name, or they are
    /// together beyond the limits; [`Error::Io`] if the file of a share is not there, because its process has saved it in
    /// another folder of that name. The checkpoint that was there is still complete then.
    pub fn finish(
        &self,
        shares: impl IntoIterator<Item = Share>,
        limits: &Limits,
    ) -> Result<Replaced> {
        let entries = merged(shares)?;
        self.check_files(&entries)?;
        let index = index_of(&entries, limits)?;
        let path = self.folder.join(INDEX);
        let replaced = atomic::replace(&path, &mut |out| out.write_all(&index))?;
        // A power loss may bring the old index back, which needs its files.
        if matches!(replaced, Replaced::Durable) {
            // It is saved, and the next save tries again.
            let kept = entries.into_iter().map(|entry| entry.file).collect();
            drop(remove_others(&self.folder, &kept, Duration::ZERO));
        }
        Ok(replaced)
    }

    /// Removes the share of a rank, of a save that will not be finished.
    pub fn remove_share(&self, rank: u64) {
        // What cannot be removed now is removed by a later save.
        drop(fs::remove_file(self.file_of(rank)));
    }

    /// Removes the folder of a save that failed, if it was made for it and all shares are removed.
    pub fn remove_folder(&self) {
        if self.is_new {
            // Only if it is empty. The error of the save is the one to report.
            drop(fs::remove_dir(&self.folder));
        }
    }

    /// Fails if the file of an entry does not reach as far as its process has said.
    fn check_files(&self, entries: &[Entry]) -> Result<()> {
        let mut lengths = BTreeMap::new();
        for entry in entries.iter().filter(|entry| !matches!(entry.kind, Kind::Empty)) {
            let len = lengths.entry(&entry.file).or_insert(0);
            *len = entry.start.saturating_add(entry.len).max(*len);
        }
        for (file, len) in lengths {
            let path = self.folder.join(file);
            let found = fs::metadata(&path).map_err(Error::io(FIND, &path))?.len();
            if found < len {
                let problem = format!("it has {found} bytes, and {len} were saved");
                return Err(Error::io(FIND, &path)(io::Error::other(problem)));
            }
        }
        Ok(())
    }
}

/// Merges the entries of all shares, sorted by name.
fn merged(shares: impl IntoIterator<Item = Share>) -> Result<Vec<Entry>> {
    let mut entries: Vec<_> = shares.into_iter().flat_map(|share| share.entries).collect();
    entries.sort_by(|one, other| one.name.cmp(&other.name));
    let within: HashSet<_> = entries
        .iter()
        .flat_map(|entry| (1..entry.path.len()).map(|len| entry.path[..len].to_vec()))
        .collect();
    entries.retain(|entry| !matches!(entry.kind, Kind::Empty) || !within.contains(&entry.path));
    entries.dedup_by(|one, other| {
        matches!((&one.kind, &other.kind), (Kind::Empty, Kind::Empty)) && one.path == other.path
    });
    match entries.windows(2).find(|pair| pair[0].name == pair[1].name) {
        Some(pair) => Err(unwritable(Some(&pair[0].name), "two processes have saved it")),
        None => Ok(entries),
    }
}

/// What an error says of the files of other processes.
const FIND: &str = "find what another process has saved in";

/// Makes the index, with the checksum after it.
pub(super) fn index_of(entries: &[Entry], limits: &Limits) -> Result<Vec<u8>> {
    let limit = limits.max_tensors;
    if entries.len() as u64 > limit {
        let problem = format!("it has more than {limit} tensors and values");
        return Err(unwritable(None, problem));
    }
    let pickle = pickle::write_index(entries, limits);
    let mut index = pickle.map_err(|problem| unwritable(None, problem))?;
    index.extend(trailer(&index));
    if index.len() as u64 > limits.max_pickle_bytes {
        let problem = format!("its index would have more than {} bytes", limits.max_pickle_bytes);
        return Err(unwritable(None, problem));
    }
    Ok(index)
}

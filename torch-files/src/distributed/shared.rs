//! Saving a folder by several processes.

use std::collections::BTreeMap;
use std::path::{self, Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

use super::files::{make, next_number, remove_others};
use super::index::{Index, Share};
use super::{FolderKind, unwritable};
use crate::atomic::{self, Fill, Replaced};
use crate::error::{Error, Result};
use crate::limits::Limits;

/// A save of one checkpoint by several processes, whose folder all of them reach.
///
/// The process of rank 0 begins it and sends its number to the others, which join it. Each saves its share with
/// [`FolderWriter::save_share`](super::FolderWriter::save_share) or
/// [`ShardWriter::save_share`](super::ShardWriter::save_share), by the kind of the folder, and sends the
/// returned [`Share`] to rank 0, which finishes the save. Nobody reads a new folder before it is finished.
///
/// # Examples
///
/// ```
/// use torch_files::distributed::{FolderKind, FolderWriter, SharedSave};
/// use torch_files::{Dtype, Limits, TensorRef, TorchFile, Value};
///
/// # let folder = std::env::temp_dir().join(format!("torch-files-doc-shared-{}", std::process::id()));
/// let tensor = |name: &str| TensorRef::contiguous(name, Dtype::Uint8, vec![1]).into();
/// let begun = SharedSave::begin(&folder, FolderKind::Distcp)?;
/// let mut shares = Vec::new();
/// for rank in 0..2u8 {
///     // In a process of its own: all lay out the same, and each keeps what it saves.
///     let save = SharedSave::join(&folder, FolderKind::Distcp)?.with_number(begun.number());
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
    kind: FolderKind,
    /// That of the files of all processes, which no file in the folder has yet.
    number: u64,
    is_new: bool,
}

impl SharedSave {
    /// Begins a save to a folder, which is created unless it exists. A checkpoint that is there stays until
    /// [`finish`](Self::finish).
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the folder cannot be created, is a file, has other files and no index, is of the other kind, or
    /// is a model in several safetensors files which another program has saved.
    pub fn begin(folder: impl AsRef<Path>, kind: FolderKind) -> Result<Self> {
        let mut begun = Self::join(folder, kind)?;
        begun.is_new = make(&begun.folder, kind)?;
        begun.number = next_number(&begun.folder, kind).inspect_err(|_| begun.remove_folder())?;
        Ok(begun)
    }

    /// Joins a save that the process of rank 0 has begun, under the path that the folder has here. Nothing is looked
    /// for in the folder. Its number, which is still to come, is 0 until [`with_number`](Self::with_number).
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the path is empty, or relative to a folder that does not exist any more.
    pub fn join(folder: impl AsRef<Path>, kind: FolderKind) -> Result<Self> {
        let folder = path::absolute(folder.as_ref()).map_err(Error::io("save", folder.as_ref()))?;
        Ok(Self { folder, kind, number: 0, is_new: false })
    }

    /// Returns the same save with the number that the process of rank 0 has sent, for one that has joined it.
    #[must_use]
    pub fn with_number(self, number: u64) -> Self {
        Self { number, ..self }
    }

    /// Returns the kind of the folder, by which each process saves its share.
    pub fn kind(&self) -> FolderKind {
        self.kind
    }

    /// Returns the number, which the other processes need.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Returns the path of the file that has the share of a rank.
    pub fn file_of(&self, rank: u64) -> PathBuf {
        self.folder.join(self.name_of(rank))
    }

    pub(super) fn name_of(&self, rank: u64) -> String {
        self.kind.name_of(rank, self.number)
    }

    /// Writes the file of a rank, for a share of this kind. No file is left after an error.
    pub(super) fn replace_file_of(
        &self,
        rank: u64,
        kind: FolderKind,
        fill: &mut Fill<'_>,
    ) -> Result<()> {
        if kind != self.kind {
            return Err(unwritable(None, "the save is that of a folder of another kind"));
        }
        match atomic::replace(&self.file_of(rank), fill)? {
            Replaced::Durable => Ok(()),
            Replaced::Uncertain { action, path, cause } => {
                // The index must not survive a power loss without it.
                drop(fs::remove_file(&path));
                Err(Error::Io { action, path, cause })
            }
        }
    }

    /// Completes the save with the index of all shares, and removes the files that only an old index names. An empty
    /// dict is left out where another share has what is in it.
    ///
    /// # Errors
    ///
    /// Those of [`atomic::replace`]; [`Error::Unwritable`] if two shares have an entry of the same name, or they are
    /// together beyond the limits; [`Error::Io`] if the file of a share is not there, because its process has saved it
    /// in another folder of that name. The checkpoint that was there is still complete then.
    pub fn finish(
        &self,
        shares: impl IntoIterator<Item = Share>,
        limits: &Limits,
    ) -> Result<Replaced> {
        let Index { bytes, files } = Index::of(self.kind, shares, limits)?;
        self.check_files(&files)?;
        let path = self.folder.join(self.kind.index());
        let replaced = atomic::replace(&path, &mut |out| out.write_all(&bytes))?;
        // A power loss may bring the old index back, which needs its files.
        if matches!(replaced, Replaced::Durable) {
            // It is saved, and the next save tries again.
            let is_kept = |name: &str| files.contains_key(name);
            drop(remove_others(&self.folder, self.kind, is_kept, Duration::ZERO));
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

    /// Fails if a file does not reach as far as its process has said.
    fn check_files(&self, lengths: &BTreeMap<String, u64>) -> Result<()> {
        for (file, len) in lengths {
            let path = self.folder.join(file);
            let found = fs::metadata(&path).map_err(Error::io(FIND, &path))?.len();
            if found < *len {
                let problem = format!("it has {found} bytes, and {len} were saved");
                return Err(Error::io(FIND, &path)(io::Error::other(problem)));
            }
        }
        Ok(())
    }
}

/// What an error says of the files of other processes.
const FIND: &str = "find what another process has saved in";

//! Errors of checkpoints.

use std::io;
use std::path::{Path, PathBuf};

use crate::error::{BoxError, list, sentence, shown, with_nearest};

/// Why a checkpoint could not be saved, loaded or restored. Unless a variant says otherwise, a failed save leaves the
/// file as it was, and a failed restore leaves its targets as they were. The messages include the causes, and so
/// `source()` does not return them. In a message, names and texts from a file are shortened, and what a terminal would
/// obey is escaped; the fields have them as they are.
///
/// # Examples
///
/// ```
/// use tch_amp::Error;
/// use tch_amp::checkpoint::{Checkpoint, CheckpointError};
///
/// # let checkpoint = Checkpoint::new();
/// // Checkpoints of the first runs have no `epoch`.
/// let epoch = match checkpoint.value::<u64>("epoch") {
///     Err(Error::Checkpoint(CheckpointError::NoPart { .. })) => 0,
///     epoch => epoch?,
/// };
/// assert_eq!(epoch, 0);
///
/// let damaged = Checkpoint::from_bytes(b"half a file".to_vec());
/// assert!(matches!(damaged, Err(Error::Checkpoint(CheckpointError::Damaged { .. }))));
/// # Ok::<(), Error>(())
/// ```
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The file was not replaced, and an existing one is unchanged. Or a folder could not be created, or what killed
    /// saves have left in it could not be removed.
    #[error(transparent)]
    Save(torch_files::Error),

    /// The new file is in place, but a power loss may bring the old one back, because the folder could not be synced.
    /// Or, on a network file system, the rename was reported as failed although the temporary file is gone.
    #[error(
        "{path} is whole, but after a power loss it may be the old file: cannot {action}: {cause}"
    )]
    Indeterminate {
        /// The operation that failed: `"sync the folder"` or `"rename"`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        cause: io::Error,
    },

    /// The operating system could not open, read, list or remove a file.
    #[error("cannot {action} `{}`: {cause}", path.display())]
    Io {
        /// The operation that failed.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The error of the operating system.
        cause: io::Error,
    },

    /// The file is not a checkpoint, or it was damaged after it was saved. Load an older one.
    #[error("`{}` is damaged or not a checkpoint: {}", path.display(), sentence(problem))]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The problem.
        problem: String,
    },

    /// The file was written by a later version of this crate.
    #[error(
        "{} has version {found} of the format, and this version of tch-amp reads up to {supported}; update tch-amp",
        path.display()
    )]
    Newer {
        /// The file.
        path: PathBuf,
        /// The version of its format.
        found: u32,
        /// The newest version that this crate reads.
        supported: u32,
    },

    /// The checkpoint was saved, but older ones that should not be kept could not be removed. Training can continue.
    #[error(
        "{} is saved, but older checkpoints could not be removed; do so by hand before the disk is full: {cause}",
        saved.display()
    )]
    NotRemoved {
        /// The checkpoint that was saved.
        saved: PathBuf,
        /// Why the older ones could not be removed.
        cause: BoxError,
    },

    /// Another checkpoint is still being saved in the background.
    #[error("another checkpoint is still being saved; wait for it, or leave this one out")]
    Busy,

    /// This checkpoint is not saved, because an earlier one that was saved in the background is missing, and nobody has
    /// waited for its error. Save again if the run can go on without that one.
    #[error(
        "this checkpoint is not saved, because an earlier save in the background has failed: {cause}; save again if the run can go on without that checkpoint"
    )]
    EarlierSave {
        /// The error of the earlier save.
        cause: BoxError,
    },

    /// The thread that was to write a checkpoint has panicked. The checkpoint was not saved, and the last one before is
    /// complete.
    #[error(
        "the checkpoint is not saved, because the thread that writes it has panicked: {}",
        sentence(message)
    )]
    WriterPanicked {
        /// The message of the panic.
        message: String,
    },

    /// Every checkpoint of the folder that was tried is damaged.
    #[error(
        "none of the {} checkpoints tried in {} is intact; move them away to start a new run. The first: {}",
        damaged.len(),
        folder.display(),
        first(damaged)
    )]
    AllDamaged {
        /// The folder.
        folder: PathBuf,
        /// The problem of each of them, in the order in which they were tried.
        damaged: Vec<CheckpointError>,
    },

    /// A part or a tensor cannot be put into a checkpoint.
    #[error("`{}` cannot be saved: {}", shown(name), sentence(problem))]
    Unsaveable {
        /// The part or the tensor.
        name: String,
        /// Why, and what to do.
        problem: String,
    },

    /// The checkpoint has no part of this name.
    #[error("the checkpoint has no `{}`; it has {}", shown(name), list(there))]
    NoPart {
        /// The name that was requested.
        name: String,
        /// The names of the parts that the checkpoint has.
        there: Vec<String>,
    },

    /// The part is of another kind than the one requested.
    #[error("`{}` in the checkpoint is {}, not {wanted}", shown(name), sentence(found))]
    OtherPart {
        /// The part.
        name: String,
        /// The kind that was requested.
        wanted: &'static str,
        /// The kind that the checkpoint holds.
        found: String,
    },

    /// The names in a part are not those of the target to be restored.
    #[error(
        "`{}` does not fit: missing in the checkpoint: {}; unexpected: {}; use `rename_prefix` to rename, or `skip` or `strict(false)` to leave out",
        shown(part),
        list(missing),
        list(unexpected)
    )]
    Keys {
        /// The part.
        part: String,
        /// The names that are missing in the checkpoint.
        missing: Vec<String>,
        /// The names that only the checkpoint has.
        unexpected: Vec<String>,
    },

    /// A saved tensor does not match its target, in shape or dtype for instance.
    #[error("`{}` in `{}` {}", shown(tensor), shown(part), sentence(problem))]
    Tensor {
        /// The part.
        part: String,
        /// The tensor.
        tensor: String,
        /// How they differ, and what to do.
        problem: String,
    },

    /// A value is not of the requested type, or cannot be represented as JSON.
    #[error("the value `{}` does not fit: {}", shown(name), sentence(&with_nearest(&cause.to_string())))]
    Value {
        /// The value.
        name: String,
        /// serde's error.
        cause: serde_json::Error,
    },

    /// An option that a program of Python has saved beside a state differs from the one here.
    #[error(
        "`{}` was saved with `{}` {}, which is {} here; use the same, or restore with `strict(false)` to go on with the option here",
        shown(part),
        shown(option),
        sentence(saved),
        sentence(here)
    )]
    OtherOption {
        /// The part.
        part: String,
        /// The option, by its name in Python.
        option: String,
        /// Its value in the checkpoint, as JSON.
        saved: String,
        /// Its value here, as JSON.
        here: String,
    },

    /// A buffer of the model, such as a running mean, has a non-finite element.
    #[error(
        "the buffer {name} has an infinite or NaN element; restore it before the model is saved (see BufferSnapshot)"
    )]
    NonFiniteBuffer {
        /// Its name in the `VarStore`.
        name: String,
    },

    /// Reading or copying failed after everything had been checked, and models, scalers and states of your own may be
    /// partly restored. Restore them again before you use them.
    #[error(
        "the restore stopped midway; models, scalers and other states may be partly restored, so restore them again: {cause}"
    )]
    Interrupted {
        /// Why it stopped.
        cause: BoxError,
    },
}

impl CheckpointError {
    /// Returns a function that makes the error of a file that could not be read.
    pub(crate) fn reading(path: &Path) -> impl Fn(torch_files::Error) -> Self {
        move |error| match error {
            torch_files::Error::Io { action, path, cause } => Self::Io { action, path, cause },
            torch_files::Error::Malformed { path, problem, .. } => {
                Self::Damaged { path, problem: sentence(&problem) }
            }
            torch_files::Error::TooMuch { path, what, limit } => Self::Damaged {
                path,
                problem: format!("the checkpoint has more than {limit} {what}"),
            },
            other => Self::damaged(path, other.to_string()),
        }
    }

    /// Makes a [`CheckpointError::Damaged`] of a problem, which may contain text from the file.
    pub(crate) fn damaged(path: &Path, problem: impl Into<String>) -> Self {
        Self::Damaged { path: path.to_owned(), problem: sentence(&problem.into()) }
    }

    /// Returns a function that makes a [`CheckpointError::Io`] of an I/O error.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl Fn(io::Error) -> Self {
        move |cause| Self::Io { action, path: path.to_owned(), cause }
    }
}

/// Makes a [`CheckpointError::Unsaveable`]. `name` is that of a part or a tensor, or `the checkpoint`.
pub(crate) fn unsaveable(name: &str, problem: impl Into<String>) -> CheckpointError {
    CheckpointError::Unsaveable { name: name.to_owned(), problem: sentence(&problem.into()) }
}

fn first(errors: &[CheckpointError]) -> String {
    errors.first().map(ToString::to_string).unwrap_or_default()
}

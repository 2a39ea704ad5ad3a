//! Errors of checkpoints.

use std::io;
use std::path::{Path, PathBuf};

use crate::atomic::SaveError;
use crate::error::BoxError;

/// Why a checkpoint could not be saved, loaded or restored. Unless a variant says otherwise, the file of a save is as
/// it was before, and what was to be restored is untouched. The messages hold the causes, which `source()` does not
/// return again.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The file could not be replaced, or not for certain.
    #[error(transparent)]
    Save(#[from] SaveError),

    /// The system refused to read, to list or to remove.
    #[error("cannot {action} `{}`: {cause}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// Where.
        path: PathBuf,
        /// The system's reason.
        cause: io::Error,
    },

    /// The file is not a checkpoint, or not what was saved. Load an older one.
    #[error("`{}` is damaged or not a checkpoint: {problem}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What does not fit.
        problem: String,
    },

    /// The file was written by a later version of this crate.
    #[error(
        "{} has version {found} of the format, and this version of tch-amp reads up to {supported}; update it",
        path.display()
    )]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its version of the format.
        found: u32,
        /// The newest known here.
        supported: u32,
    },

    /// The checkpoint is saved, but older ones that are not to be kept could not be removed. Training may go on.
    #[error(
        "{} is saved, but older checkpoints could not be removed; do so by hand before the disk is full: {cause}",
        saved.display()
    )]
    NotRemoved {
        /// What was saved.
        saved: PathBuf,
        /// Why the others could not be removed.
        cause: BoxError,
    },

    /// All checkpoints of a folder that could have been taken are damaged.
    #[error(
        "none of the {} checkpoints tried in {} is whole; move them away to start anew. The first: {}",
        damaged.len(),
        folder.display(),
        first(damaged)
    )]
    AllDamaged {
        /// The folder.
        folder: PathBuf,
        /// What is wrong with each, in the order in which they were tried.
        damaged: Vec<CheckpointError>,
    },

    /// Something that cannot be put into a checkpoint.
    #[error("`{name}` cannot be saved: {problem}")]
    Unsaveable {
        /// The part, or the tensor.
        name: String,
        /// Why, and what to do.
        problem: String,
    },

    /// There is no such part.
    #[error("the checkpoint has no `{name}`; it has {}", list(there))]
    NoPart {
        /// The part asked for.
        name: String,
        /// The parts that are there.
        there: Vec<String>,
    },

    /// The part is of another kind.
    #[error("`{name}` in the checkpoint is {found}, not {wanted}")]
    OtherPart {
        /// The part.
        name: String,
        /// What was asked for.
        wanted: &'static str,
        /// What is there.
        found: String,
    },

    /// A part does not have the names of what is to be restored.
    #[error(
        "`{part}` does not fit: missing in the checkpoint: {}; unexpected: {}; `rename_prefix` renames, `skip` and `strict(false)` leave out",
        list(missing),
        list(unexpected)
    )]
    Keys {
        /// The part.
        part: String,
        /// The names that the checkpoint lacks.
        missing: Vec<String>,
        /// The names that only the checkpoint has.
        unexpected: Vec<String>,
    },

    /// A tensor is not like the one that it is for.
    #[error("`{tensor}` in `{part}` {problem}")]
    Tensor {
        /// The part.
        part: String,
        /// The tensor.
        tensor: String,
        /// How it differs, and what to do.
        problem: String,
    },

    /// A value is not of the type asked for, or JSON cannot hold it.
    #[error("the value `{name}` does not fit: {cause}")]
    Value {
        /// The value.
        name: String,
        /// What serde says.
        cause: serde_json::Error,
    },

    /// A buffer of the model (such as a running mean) holds an infinity or a NaN.
    #[error(
        "the buffer {name} holds an infinity or a NaN; restore it before the model is saved (see BufferSnapshot)"
    )]
    NonFiniteBuffer {
        /// Its name in the VarStore.
        name: String,
    },

    /// Reading or copying failed after everything had been checked: models, scalers and states of your own may be half
    /// restored. Restore again before they are used.
    #[error(
        "restoring stopped midway, and models, scalers and other states may be half restored; do it again: {cause}"
    )]
    Interrupted {
        /// What happened.
        cause: BoxError,
    },
}

impl CheckpointError {
    /// Makes a [`CheckpointError::Io`] of an error.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl Fn(io::Error) -> Self {
        move |cause| Self::Io { action, path: path.to_owned(), cause }
    }
}

/// The name may be a part's, a tensor's, or `the checkpoint`.
pub(crate) fn unsaveable(name: &str, problem: impl Into<String>) -> CheckpointError {
    CheckpointError::Unsaveable { name: name.to_owned(), problem: problem.into() }
}

fn first(errors: &[CheckpointError]) -> String {
    errors.first().map(ToString::to_string).unwrap_or_default()
}

fn list(names: &[String]) -> String {
    const SHOWN: usize = 8;
    if names.is_empty() {
        return "nothing".to_owned();
    }
    let shown: Vec<_> = names.iter().take(SHOWN).map(|name| format!("`{name}`")).collect();
    let rest = match names.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    shown.join(", ") + &rest
}

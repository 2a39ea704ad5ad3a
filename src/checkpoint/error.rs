//! Why a checkpoint could not be saved, loaded or restored.

#![forbid(unsafe_code)]

use std::io;
use std::path::PathBuf;

use crate::checkpoint::SaveError;

/// Why a checkpoint could not be saved, loaded or restored. Unless a variant says otherwise, the file of a save is as it
/// was before, and what was to be restored is untouched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The file could not be replaced, or not for certain.
    #[error(transparent)]
    Save(#[from] SaveError),

    /// The system refused to read, to list or to remove.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// Where.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },

    /// The file is no checkpoint, or not what was saved. Load an older one.
    #[error("{} is damaged or no checkpoint: {problem}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What does not fit.
        problem: String,
    },

    /// The file was written by a later version of this crate.
    #[error("{} has the format {found}, and this version of tch-amp reads up to {supported}; update it", path.display())]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its format.
        found: u32,
        /// The newest known here.
        supported: u32,
    },

    /// The checkpoint is saved, but others that are not to be kept could not be removed, and the disk may fill up.
    #[error("{} is saved, but what it replaces is still there", saved.display())]
    Kept {
        /// What was saved.
        saved: PathBuf,
        /// Why.
        source: Box<crate::Error>,
    },

    /// A folder has checkpoints, but all are damaged. To start anew, move them away.
    #[error("{} has no whole checkpoint; the newest: {}", folder.display(), first(damaged))]
    AllDamaged {
        /// The folder.
        folder: PathBuf,
        /// What is wrong with each, from the one that was tried first.
        damaged: Vec<CheckpointError>,
    },

    /// Something that cannot be put into a checkpoint.
    #[error("`{name}` cannot be saved: {problem}")]
    Unsaveable {
        /// The part, or the tensor.
        name: String,
        /// Why.
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

    /// A part has not the names of what is to be restored. Non-strict loading leaves them out.
    #[error(
        "`{part}` does not fit: missing in the checkpoint: {}; unexpected: {}",
        list(missing),
        list(unexpected)
    )]
    Names {
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

    /// A value is not of the type asked for.
    #[error("the value `{name}` does not fit: {source}")]
    Value {
        /// The value.
        name: String,
        /// What serde says.
        source: serde_json::Error,
    },

    /// Reading failed after everything had been checked, while models were being overwritten: they are half restored.
    /// Load again before they are used.
    #[error("restoring stopped midway, and the models are half restored; load again: {source}")]
    Interrupted {
        /// What happened.
        source: Box<crate::Error>,
    },
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

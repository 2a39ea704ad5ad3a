//! The files of a folder.

use std::path::{Path, PathBuf};

use crate::checkpoint::folder::name;
use crate::checkpoint::{Checkpoint, CheckpointError};

/// A checkpoint in a folder, as described by its file name. The file may be damaged.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct CheckpointFile {
    /// The step that it was saved under, such as the number of completed steps or epochs.
    pub step: u64,
    /// The score that [`save_scored`](crate::checkpoint::CheckpointFolder::save_scored) was called with.
    pub score: Option<f64>,
    /// The path of the file.
    pub path: PathBuf,
}

/// A checkpoint that was found in a folder, loaded and verified.
#[derive(Debug)]
#[non_exhaustive]
pub struct Found {
    /// The file that it was loaded from.
    pub file: CheckpointFile,
    /// The loaded checkpoint.
    pub checkpoint: Checkpoint,
    /// Why the checkpoints that would have been preferred were skipped.
    pub damaged: Vec<CheckpointError>,
}

/// Where a run starts; see [`resume_or_start`](crate::checkpoint::CheckpointFolder::resume_or_start).
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Start {
    /// The step of the checkpoint, or 0 for a new run.
    pub step: u64,
    /// The checkpoint that the run resumes from; `None` for a new run.
    pub from: Option<PathBuf>,
    /// Why newer checkpoints were skipped.
    pub damaged: Vec<CheckpointError>,
}

impl CheckpointFile {
    /// Returns the file at a path if its name is that of a checkpoint and it is not a folder.
    pub(super) fn at(path: &Path) -> Option<Self> {
        let (step, score) = name::parse(path.file_name()?.to_str()?)?;
        path.is_file().then(|| Self { step, score, path: path.to_owned() })
    }
}

//! The files of a folder.

use std::path::{Path, PathBuf};

use crate::checkpoint::folder::name;
use crate::checkpoint::{Checkpoint, CheckpointError};

/// One of a folder's checkpoints, as its name describes it. It may be damaged.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct CheckpointFile {
    /// How many steps, or epochs, were done.
    pub step: u64,
    /// What [`save_scored`](crate::checkpoint::CheckpointFolder::save_scored) was given.
    pub score: Option<f64>,
    /// Where it is.
    pub path: PathBuf,
}

/// A checkpoint that was found, loaded and verified.
#[derive(Debug)]
#[non_exhaustive]
pub struct Found {
    /// Which it is.
    pub file: CheckpointFile,
    /// What it holds.
    pub checkpoint: Checkpoint,
    /// Why others, which would have come first, were passed over.
    pub damaged: Vec<CheckpointError>,
}

/// Where a run begins; see [`resume_or_start`](crate::checkpoint::CheckpointFolder::resume_or_start).
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Start {
    /// How many steps are done: 0 for a new run.
    pub step: u64,
    /// The checkpoint that the run goes on from; `None` for a new run.
    pub from: Option<PathBuf>,
    /// Why newer ones were passed over.
    pub damaged: Vec<CheckpointError>,
}

impl CheckpointFile {
    /// What the name says, if it is one of ours. Not a folder.
    pub(super) fn at(path: &Path) -> Option<Self> {
        let (step, score) = name::parse(path.file_name()?.to_str()?)?;
        path.is_file().then(|| Self { step, score, path: path.to_owned() })
    }
}

//! The checkpoints of a run in a folder: the last ones, the best ones, and where to go on.

mod file;
mod keep;
mod name;
#[cfg(test)]
mod tests;

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use crate::atomic;
use crate::checkpoint::folder::keep::best_first;
use crate::checkpoint::{Checkpoint, CheckpointError, Format};
use crate::error::{Error, Result};

pub use file::{CheckpointFile, Found, Start};
pub use keep::Better;

/// How often a folder is listed again because a file has vanished meanwhile.
const MAX_LISTINGS: usize = 100;

/// How many listings without a file make an empty folder: while files come and go, one may show neither the old ones
/// nor the new.
const EMPTY_LISTINGS: usize = 3;

/// A folder of checkpoints that are named after their steps: it keeps the last ones and the best ones, and finds the
/// one to go on from.
///
/// The names say all, such as `step-00000100.safetensors` and `step-00000100-score-0.25.safetensors`, so that there is
/// no index to lose. Other files in the folder are left alone. One process at a time may save to
/// it; others may read.
///
/// ```
/// use tch::{Device, nn};
/// use tch_amp::checkpoint::{Better, Checkpoint, CheckpointFolder};
/// # let path = std::env::temp_dir().join(format!("tch-amp-doc-folder-{}", std::process::id()));
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let net = nn::linear(vs.root(), 4, 1, Default::default());
/// let folder = CheckpointFolder::new(&path)?.keep_last(3).keep_best(1, Better::Lower);
/// let start = folder.resume_or_start(|checkpoint| {
///     checkpoint.restore().model("model", &vs).apply()?;
///     Ok(())
/// })?;
/// for epoch in start.step..5 {
///     // ... train and validate ...
///     let loss = 1.0 / (1 + epoch) as f64;
///     let mut checkpoint = Checkpoint::new();
///     checkpoint.add_model("model", &vs)?;
///     folder.save_scored(epoch + 1, loss, &checkpoint)?;
/// }
/// let steps: Vec<_> = folder.files()?.iter().map(|file| file.step).collect();
/// assert_eq!(steps, [3, 4, 5]);
/// # std::fs::remove_dir_all(path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct CheckpointFolder {
    path: PathBuf,
    format: Format,
    last: usize,
    best: Option<(usize, Better)>,
}

impl CheckpointFolder {
    /// Opens a folder, and creates it where there is none. All checkpoints are kept, as safetensors. A new run needs a
    /// folder of its own. Whether files can be written shows at the first save.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Save`] if it cannot be created.
    pub fn new(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        atomic::create_folder(&path).map_err(CheckpointError::from)?;
        Ok(Self { path, format: Format::Safetensors, last: usize::MAX, best: None })
    }

    /// Keeps the `count` checkpoints of the highest steps, at least one. A save removes the older ones after it is
    /// done, so that the disk holds one more for a while.
    pub fn keep_last(mut self, count: usize) -> Self {
        self.last = count.max(1);
        self
    }

    /// Keeps the `count` checkpoints of the best scores as well, however old. Of equal ones the later is better, and
    /// NaN is worse than any number.
    pub fn keep_best(mut self, count: usize, better: Better) -> Self {
        self.best = Some((count, better));
        self
    }

    /// Sets the format of the next saves. Those there are found in either.
    pub fn format(mut self, format: Format) -> Self {
        self.format = format;
        self
    }

    /// Saves as [`Checkpoint::save`] under the name of a step, in place of another checkpoint of that step, and removes
    /// those that are not to be kept. Returns the path.
    ///
    /// Files of higher steps than this one, left over when a run goes back, are neither counted nor removed.
    ///
    /// # Errors
    ///
    /// As [`Checkpoint::save`]; [`CheckpointError::NotRemoved`] when it is saved, but others could not be removed: then
    /// training may go on.
    pub fn save(&self, step: u64, checkpoint: &Checkpoint) -> Result<PathBuf> {
        self.save_named(step, None, checkpoint)
    }

    /// Saves as [`save`](Self::save), with a score for [`keep_best`](Self::keep_best) such as the validation loss.
    ///
    /// # Errors
    ///
    /// As [`save`](Self::save).
    pub fn save_scored(&self, step: u64, score: f64, checkpoint: &Checkpoint) -> Result<PathBuf> {
        self.save_named(step, Some(score), checkpoint)
    }

    fn save_named(
        &self,
        step: u64,
        score: Option<f64>,
        checkpoint: &Checkpoint,
    ) -> Result<PathBuf> {
        let path = self.path.join(name::of(step, score, self.format));
        checkpoint.save_as(&path, self.format)?;
        self.remove_others(step, &path)?;
        Ok(path)
    }

    /// Returns the checkpoints in the folder by their names, those of lower steps first. Nothing is loaded.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Io`] if the folder cannot be listed.
    pub fn files(&self) -> Result<Vec<CheckpointFile>> {
        let listed = fs::read_dir(&self.path).and_then(|entries| {
            let read = entries.filter_map(|entry| {
                entry.map(|entry| CheckpointFile::at(&entry.path())).transpose()
            });
            read.collect::<io::Result<Vec<_>>>()
        });
        let mut files = listed.map_err(CheckpointError::io("list", &self.path))?;
        files.sort_by_key(|file| file.step);
        Ok(files)
    }

    /// Loads the checkpoint of the highest step that is not damaged; `None` when the folder has none at all.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::AllDamaged`]; [`CheckpointError::Newer`] and [`CheckpointError::Io`] of a file that comes
    /// before a valid one: it may be whole.
    pub fn latest(&self) -> Result<Option<Found>> {
        self.first_valid(|files| files.reverse(), |path| Checkpoint::load(path))
    }

    /// Loads the checkpoint of the best score that is not damaged; `None` when none has a score.
    ///
    /// # Errors
    ///
    /// As [`latest`](Self::latest).
    pub fn best(&self, better: Better) -> Result<Option<Found>> {
        self.first_valid(|files| best_first(files, better), |path| Checkpoint::load(path))
    }

    /// Goes on from the newest checkpoint that is not damaged, which `resume` restores, or starts anew where there is
    /// none. For errors of other kinds use [`latest`](Self::latest).
    ///
    /// # Errors
    ///
    /// Those of [`latest`](Self::latest) and of `resume`. A folder of nothing but damaged checkpoints is an error, not
    /// a new run.
    pub fn resume_or_start(&self, resume: impl FnOnce(&Checkpoint) -> Result<()>) -> Result<Start> {
        let Some(Found { file, checkpoint, damaged }) = self.latest()? else {
            return Ok(Start::default());
        };
        resume(&checkpoint)?;
        Ok(Start { step: file.step, from: Some(file.path), damaged })
    }

    /// Loads the first of the files, in the order that `sort` gives them, that is not damaged.
    fn first_valid(
        &self,
        sort: impl Fn(&mut Vec<CheckpointFile>),
        load: impl Fn(&Path) -> Result<Checkpoint>,
    ) -> Result<Option<Found>> {
        let mut empty = 0;
        for _ in 0..MAX_LISTINGS {
            let mut files = self.files()?;
            sort(&mut files);
            empty += usize::from(files.is_empty());
            if empty == EMPTY_LISTINGS {
                return Ok(None);
            }
            let (mut damaged, mut gone) = (Vec::new(), false);
            for file in files {
                match load(&file.path) {
                    Ok(checkpoint) => return Ok(Some(Found { file, checkpoint, damaged })),
                    Err(Error::Checkpoint(error @ CheckpointError::Damaged { .. })) => {
                        damaged.push(error);
                    }
                    Err(Error::Checkpoint(CheckpointError::Io { cause, .. }))
                        if cause.kind() == ErrorKind::NotFound =>
                    {
                        gone = true;
                    }
                    Err(error) => return Err(error),
                }
            }
            // Where one is gone, another process has saved a newer one before it removed it.
            if !gone && !damaged.is_empty() {
                let folder = self.path.clone();
                return Err(CheckpointError::AllDamaged { folder, damaged }.into());
            }
        }
        let problem = io::Error::other("its files vanish faster than they can be loaded");
        Err(CheckpointError::io("list", &self.path)(problem).into())
    }
}

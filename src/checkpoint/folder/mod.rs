//! The checkpoints of a run in a folder: keeping the last and the best ones, and finding the one to resume from.

mod pending;
#[cfg(test)]
mod tests;

use std::cmp::Ordering;
use std::fs;
use std::io::{self, ErrorKind};
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use torch_files::{atomic, distributed};

use crate::checkpoint::sharded::{self, Exchange};
use crate::checkpoint::{Checkpoint, CheckpointError, Format};
use crate::error::{Error, Result};

use pending::Background;

pub use pending::PendingSave;

/// How often a folder is listed again because a file vanished before it could be loaded.
const MAX_LISTINGS: usize = 100;

/// How many listings must be empty before the folder counts as empty: while another process replaces files, a listing
/// may show neither the old nor the new ones.
const EMPTY_LISTINGS: usize = 3;

/// A running save writes more often than this, so an older temporary file was left behind by a killed process.
const LEFTOVER_AGE: Duration = Duration::from_secs(3600);

/// The better one of two values of a metric. The counterpart of the `mode` of PyTorch's `ReduceLROnPlateau` and of
/// Lightning's `ModelCheckpoint`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MetricGoal {
    /// A lower one, such as a loss.
    #[default]
    Min,
    /// A higher one, such as an accuracy.
    Max,
}

/// A folder of checkpoints that are named after their steps. It keeps the last and the best of them, and finds the one
/// to resume from.
///
/// The file names hold the step and the score, as in `step-00000100.safetensors` and
/// `step-00000100-score-0.25.safetensors`, so there is no index that could be lost. With [`Format::Dcp`] each checkpoint
/// is a folder, such as `step-00000100.dcp`, and so it is with [`Format::Safetensors`] if several ranks save it:
/// `step-00000100.shards`. Other files in the folder are left alone. Only one process at a time may save to the folder,
/// or the ranks of one group together by `Checkpoint::sharded`; others may read from it meanwhile.
///
/// # Examples
///
/// ```
/// use tch::{Device, nn};
/// use tch_amp::checkpoint::{Checkpoint, CheckpointFolder, MetricGoal};
/// # let path = std::env::temp_dir().join(format!("tch-amp-doc-folder-{}", std::process::id()));
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let net = nn::linear(vs.root(), 4, 1, Default::default());
/// let folder = CheckpointFolder::new(&path)?.keep_last(3).keep_best(1, MetricGoal::Min);
/// let start = folder.resume_or_start(|checkpoint| {
///     checkpoint.restore().add("model", &vs).apply()?;
///     Ok(())
/// })?;
/// for epoch in start.step..5 {
///     // ... train and validate ...
///     let loss = 1.0 / (1 + epoch) as f64;
///     let mut checkpoint = Checkpoint::new();
///     checkpoint.add("model", &vs)?;
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
    best: Option<(usize, MetricGoal)>,
    /// The saves in the background, which all clones share.
    background: Arc<Background>,
    /// Whether such a save is refused while another one runs, and how many bytes per second it may write.
    refuses: bool,
    rate: Option<NonZeroU64>,
}

impl CheckpointFolder {
    /// Opens a folder, and creates it if it does not exist. By default all checkpoints are kept, and saved as
    /// safetensors. Use a separate folder for each run. Whether the folder is writable is not checked before the first
    /// save.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Save`] if the folder cannot be created.
    pub fn new(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        atomic::create_folder(&path).map_err(CheckpointError::Save)?;
        let (background, refuses, rate) = (Arc::default(), false, None);
        let (format, last, best) = (Format::Safetensors, usize::MAX, None);
        Ok(Self { path, format, last, best, background, refuses, rate })
    }

    /// Keeps the `count` checkpoints with the highest steps, and at least one. A save removes older ones only after it
    /// has succeeded, so that for a short time the disk holds one more.
    pub fn keep_last(mut self, count: usize) -> Self {
        self.last = count.max(1);
        self
    }

    /// Also keeps the `count` checkpoints with the best scores, however old they are. Of two equal scores the later one
    /// is better, and NaN is worse than any number.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch_amp::checkpoint::{Checkpoint, CheckpointFolder, MetricGoal};
    ///
    /// # let path = std::env::temp_dir().join(format!("tch-amp-doc-keep-best-{}", std::process::id()));
    /// let folder = CheckpointFolder::new(&path)?.keep_last(1).keep_best(1, MetricGoal::Max);
    /// for (epoch, accuracy) in [(1, 0.7), (2, 0.9), (3, 0.8), (4, 0.6)] {
    ///     folder.save_scored(epoch, accuracy, &Checkpoint::new())?;
    /// }
    /// let kept: Vec<_> = folder.files()?.iter().map(|file| (file.step, file.score)).collect();
    /// assert_eq!(kept, [(2, Some(0.9)), (4, Some(0.6))]);
    /// # std::fs::remove_dir_all(path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn keep_best(mut self, count: usize, goal: MetricGoal) -> Self {
        self.best = Some((count, goal));
        self
    }

    /// Sets the format of later saves. Existing checkpoints are found in any format.
    pub fn format(mut self, format: Format) -> Self {
        self.format = format;
        self
    }

    /// Saves a checkpoint under the name of a step, and removes those that should not be kept, including another
    /// checkpoint of the same step. Returns the path. Saves like [`Checkpoint::save`].
    ///
    /// Temporary files that killed saves have left are removed after an hour, or at once if the disk is full: the save
    /// is then tried once more.
    ///
    /// Waits until no other save of the folder or of its clones runs.
    ///
    /// Checkpoints of higher steps, which are left when a run resumes from an earlier one, are neither counted nor
    /// removed.
    ///
    /// # Errors
    ///
    /// See [`Checkpoint::save`]; [`CheckpointError::NotRemoved`] if the checkpoint was saved, but others could not be
    /// removed, after which training can continue; and [`CheckpointError::EarlierSave`] if an earlier
    /// [`save_async`](Self::save_async), for which nobody has waited, has failed: nothing is saved then.
    pub fn save(&self, step: u64, checkpoint: &Checkpoint) -> Result<PathBuf> {
        self.save_here(step, None, checkpoint)
    }

    /// Saves a checkpoint with a score for [`keep_best`](Self::keep_best), such as the validation loss. Otherwise the
    /// same as [`save`](Self::save).
    ///
    /// # Errors
    ///
    /// The same as [`save`](Self::save).
    pub fn save_scored(&self, step: u64, score: f64, checkpoint: &Checkpoint) -> Result<PathBuf> {
        self.save_here(step, Some(score), checkpoint)
    }

    /// Saves on this thread.
    fn save_here(&self, step: u64, score: Option<f64>, checkpoint: &Checkpoint) -> Result<PathBuf> {
        let name = self.name_of(step, score, checkpoint);
        let prepared = checkpoint.check_parts().and_then(|()| {
            let turn = self.background.take_turn()?;
            Ok((turn, checkpoint.share(self.format)?))
        });
        let (_turn, share) = checkpoint.agree(&name, prepared)?;
        let ranks = checkpoint.exchange();
        self.save_named(step, &name, share.as_ref().unwrap_or(checkpoint), ranks)
    }

    /// Returns the name of a checkpoint that is saved here.
    fn name_of(&self, step: u64, score: Option<f64>, checkpoint: &Checkpoint) -> String {
        name_of(step, score, ending(self.format, checkpoint.ranks.is_some()))
    }

    /// Saves all of a checkpoint, or a share of it together with the other ranks.
    fn save_named(
        &self,
        step: u64,
        name: &str,
        checkpoint: &Checkpoint,
        ranks: Option<&dyn Exchange>,
    ) -> Result<PathBuf> {
        let path = self.path.join(name);
        if let Err(error) = checkpoint.save_with(&path, self.format, ranks) {
            if !sharded::on_any_rank(self.makes_room(&error), &error, ranks) {
                return Err(error);
            }
            checkpoint.save_with(&path, self.format, ranks)?;
        }
        if ranks.is_none_or(|ranks| ranks.rank() == 0) {
            self.remove_others(step, &path)?;
        }
        Ok(path)
    }

    /// Returns the checkpoints in the folder, sorted by step. They are recognized by their file names, and nothing is
    /// loaded.
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

    /// Loads the checkpoint with the highest step that is not damaged. Returns `None` if the folder has no checkpoints.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::AllDamaged`]; [`CheckpointError::Newer`] or [`CheckpointError::Io`] for a file that is tried
    /// before an intact one is found, because that file may be intact itself.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch_amp::checkpoint::{Checkpoint, CheckpointFolder};
    ///
    /// # let path = std::env::temp_dir().join(format!("tch-amp-doc-latest-{}", std::process::id()));
    /// let folder = CheckpointFolder::new(&path)?;
    /// folder.save(1, &Checkpoint::new())?;
    /// let newest = folder.save(2, &Checkpoint::new())?;
    /// std::fs::write(newest, "overwritten by another program")?;
    ///
    /// let found = folder.latest()?.ok_or("the folder is empty")?;
    /// assert_eq!((found.file.step, found.damaged.len()), (1, 1));
    /// # std::fs::remove_dir_all(path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn latest(&self) -> Result<Option<Found>> {
        self.first_valid(|files| files.reverse(), |path| Checkpoint::load(path))
    }

    /// Loads the checkpoint with the best score that is not damaged. Returns `None` if no checkpoint has a score.
    ///
    /// # Errors
    ///
    /// The same as [`latest`](Self::latest).
    pub fn best(&self, goal: MetricGoal) -> Result<Option<Found>> {
        self.first_valid(|files| best_first(files, goal), |path| Checkpoint::load(path))
    }

    /// Resumes from the checkpoint with the highest step that is not damaged, by passing it to `resume`, or starts a
    /// new run if the folder has no checkpoints. If `resume` needs another error type, use [`latest`](Self::latest)
    /// instead.
    ///
    /// # Errors
    ///
    /// Those of [`latest`](Self::latest) and of `resume`. A folder in which every checkpoint is damaged is an error,
    /// not a new run.
    pub fn resume_or_start(&self, resume: impl FnOnce(&Checkpoint) -> Result<()>) -> Result<Start> {
        let Some(Found { file, checkpoint, damaged }) = self.latest()? else {
            return Ok(Start::default());
        };
        resume(&checkpoint)?;
        Ok(Start { step: file.step, from: Some(file.path), damaged })
    }

    /// Removes the files that are no longer needed after a checkpoint was saved.
    fn remove_others(&self, step: u64, saved: &Path) -> Result<()> {
        let removed = self.superfluous(step, saved).and_then(|files| {
            files.iter().try_for_each(|file| remove(&file.path))?;
            Ok(self.remove_leftovers(LEFTOVER_AGE).map(drop).map_err(CheckpointError::Save)?)
        });
        removed.map_err(|cause| {
            CheckpointError::NotRemoved { saved: saved.to_owned(), cause: Box::new(cause) }.into()
        })
    }

    /// Makes room after a save has failed for lack of space, by removing what killed saves have left, however young it
    /// is. Returns whether there was anything.
    fn makes_room(&self, failed: &Error) -> bool {
        let Error::Checkpoint(CheckpointError::Save(error)) = failed else { return false };
        let is_full = is_out_of_space(error);
        // An error here is not the one to report.
        is_full && self.remove_leftovers(Duration::ZERO).is_ok_and(|removed| removed > 0)
    }

    fn remove_leftovers(&self, age: Duration) -> torch_files::Result<usize> {
        let files = atomic::remove_leftovers(&self.path, age, |name| parse(name).is_some())?;
        // A listing that fails has failed for the files already.
        let entries = fs::read_dir(&self.path).into_iter().flatten().flatten();
        let folders = entries.map(|entry| entry.path()).filter(|path| names_folder(path));
        let removed = folders.map(|path| distributed::remove_leftover(&path, age).map(usize::from));
        Ok(files + removed.sum::<torch_files::Result<usize>>()?)
    }

    fn superfluous(&self, step: u64, saved: &Path) -> Result<Vec<CheckpointFile>> {
        let mut files = self.files()?;
        files.retain(|file| file.step <= step);
        let (same, mut earlier): (Vec<_>, Vec<_>) =
            files.into_iter().partition(|file| file.step == step);
        let saved_file = same.iter().find(|file| file.path == saved).cloned();
        let replaced = same.into_iter().filter(|file| file.path != saved);
        let kept: Vec<_> = match self.best {
            Some((count, goal)) => {
                let mut all: Vec<_> = earlier.iter().cloned().chain(saved_file).collect();
                best_first(&mut all, goal);
                all.truncate(count);
                all
            }
            None => Vec::new(),
        };
        earlier.truncate(earlier.len().saturating_sub(self.last - 1));
        earlier.retain(|file| !kept.contains(file));
        Ok(earlier.into_iter().chain(replaced).collect())
    }

    /// Loads the first file that is not damaged, in the order of `sort`.
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
                    // A folder that is being removed loses its index before its other files.
                    Err(Error::Checkpoint(CheckpointError::Damaged { .. }))
                        if CheckpointFile::at(&file.path).is_none() =>
                    {
                        gone = true;
                    }
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
            // If a file is gone, another process has removed it after it had saved a newer one.
            if !gone && !damaged.is_empty() {
                let folder = self.path.clone();
                return Err(CheckpointError::AllDamaged { folder, damaged }.into());
            }
        }
        let problem = io::Error::other("its files vanish faster than they can be loaded");
        Err(CheckpointError::io("list", &self.path)(problem).into())
    }
}

/// Removes a checkpoint, unless it is gone.
fn remove(path: &Path) -> Result<()> {
    if !path.is_dir() {
        return match fs::remove_file(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            removed => Ok(removed.map_err(CheckpointError::io("remove", path))?),
        };
    }
    match distributed::remove(path) {
        Err(torch_files::Error::Io { cause, .. }) if cause.kind() == ErrorKind::NotFound => Ok(()),
        Err(torch_files::Error::Io { path, cause, .. }) => {
            Err(CheckpointError::io("remove", &path)(cause).into())
        }
        removed => Ok(removed.map_err(CheckpointError::Save)?),
    }
}

fn is_out_of_space(error: &torch_files::Error) -> bool {
    match error {
        torch_files::Error::Io { cause, .. } => {
            matches!(cause.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
        }
        torch_files::Error::Leftover { cause, .. } => is_out_of_space(cause),
        _ => false,
    }
}

/// Sorts the files by score, the best first, and drops those without a score.
fn best_first(files: &mut Vec<CheckpointFile>, goal: MetricGoal) {
    let key = |file: &CheckpointFile| {
        let score = file.score.filter(|score| !score.is_nan())?;
        // A larger key is better. Adding 0 turns -0 into 0.
        Some(if goal == MetricGoal::Min { -score } else { score } + 0.0)
    };
    files.retain(|file| file.score.is_some());
    files.sort_by(|a, b| {
        let by_score = key(b).partial_cmp(&key(a)).unwrap_or(Ordering::Equal);
        by_score.then(b.step.cmp(&a.step))
    });
}

const STEP: &str = "step-";
const SCORE: &str = "-score-";

// A file name holds the step and the score; there is no other index of a folder. It is `step-` and the step in at least
// eight digits, `-score-` and the score if there is one, and the ending of the format.

/// The longest score, in characters, that is written without an exponent. With an exponent every number takes at most
/// 24 characters.
const MAX_DIGITS: usize = 20;

/// A checkpoint in a folder, as described by its file name. The file may be damaged.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct CheckpointFile {
    /// The step that it was saved under, such as the number of completed steps or epochs.
    pub step: u64,
    /// The score that [`save_scored`](crate::checkpoint::CheckpointFolder::save_scored) was called with.
    pub score: Option<f64>,
    /// The path of the file, or of the folder that a checkpoint is in some formats.
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
    /// Returns the file at a path if its name is that of a checkpoint: a folder if its save has finished, for the format
    /// that is one, and otherwise not a folder.
    pub(super) fn at(path: &Path) -> Option<Self> {
        let (step, score) = parse(path.file_name()?.to_str()?)?;
        let is_there =
            if names_folder(path) { distributed::is_whole(path) } else { path.is_file() };
        is_there.then(|| Self { step, score, path: path.to_owned() })
    }
}

/// Returns the name of a checkpoint. Names sort by step up to eight digits, and a score parses back to exactly the same
/// number.
pub(super) fn name_of(step: u64, score: Option<f64>, ending: &str) -> String {
    let score = score.map(|score| {
        let plain = score.to_string();
        let text = if plain.len() > MAX_DIGITS { format!("{score:e}") } else { plain };
        format!("{SCORE}{text}")
    });
    format!("{STEP}{step:08}{}.{ending}", score.unwrap_or_default())
}

/// Returns the step and the score in a name, or `None` if it is not the name of a checkpoint.
pub(super) fn parse(name: &str) -> Option<(u64, Option<f64>)> {
    ENDINGS.into_iter().find_map(|ending| {
        let stem = name.strip_suffix(ending)?.strip_suffix('.')?;
        let (step, score) = match stem.split_once(SCORE) {
            Some((step, score)) => (step, Some(score.parse().ok()?)),
            None => (stem, None),
        };
        let step = step.strip_prefix(STEP)?.parse().ok()?;
        // Only names exactly as this crate writes them: a copy under a similar name belongs to the user.
        (name_of(step, score, ending) == name).then_some((step, score))
    })
}

const FILE: &str = "safetensors";
const SHARDS: &str = "shards";
const TORCH: &str = "pt";
const DCP: &str = "dcp";
const ENDINGS: [&str; 4] = [FILE, SHARDS, TORCH, DCP];

/// Returns the ending of a name. A folder and a file, of which neither replaces the other, have different ones.
pub(super) fn ending(format: Format, is_sharded: bool) -> &'static str {
    match format {
        Format::Safetensors if is_sharded => SHARDS,
        Format::Safetensors => FILE,
        Format::Torch | Format::TorchByName => TORCH,
        Format::Dcp => DCP,
    }
}

/// Returns whether a name is that of a checkpoint that is a folder.
fn names_folder(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    let is_folder = |name: &str| [SHARDS, DCP].into_iter().any(|ending| name.ends_with(ending));
    name.is_some_and(|name| is_folder(name) && parse(name).is_some())
}

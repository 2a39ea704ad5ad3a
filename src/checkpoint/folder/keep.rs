//! Which files a folder keeps.

use std::cmp::Ordering;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

use crate::atomic;
use crate::checkpoint::folder::{CheckpointFile, CheckpointFolder, name};
use crate::checkpoint::{CheckpointError, SaveError};
use crate::error::{Error, Result};

/// A running save writes more often than this, so an older temporary file was left behind by a killed process.
const LEFTOVER_AGE: Duration = Duration::from_secs(3600);

/// Which of two scores is better. The counterpart of the `mode` of Lightning's `ModelCheckpoint`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    /// The lower score is better, such as a loss.
    Lower,
    /// The higher score is better, such as an accuracy.
    Higher,
}

impl CheckpointFolder {
    /// Removes the files that are no longer needed after a checkpoint was saved.
    pub(super) fn remove_others(&self, step: u64, saved: &Path) -> Result<()> {
        let removed = self.superfluous(step, saved).and_then(|files| {
            for file in files {
                match fs::remove_file(&file.path) {
                    Err(error) if error.kind() == ErrorKind::NotFound => {}
                    removed => removed.map_err(CheckpointError::io("remove", &file.path))?,
                }
            }
            Ok(self.remove_leftovers(LEFTOVER_AGE).map(drop).map_err(CheckpointError::from)?)
        });
        removed.map_err(|cause| {
            CheckpointError::NotRemoved { saved: saved.to_owned(), cause: Box::new(cause) }.into()
        })
    }

    /// Makes room after a save has failed for lack of space, by removing what killed saves have left, however young it is.
    /// Returns whether there was anything.
    pub(super) fn makes_room(&self, failed: &Error) -> bool {
        let Error::Checkpoint(CheckpointError::Save(error)) = failed else { return false };
        let is_full = is_out_of_space(error);
        // An error here is not the one to report.
        is_full && self.remove_leftovers(Duration::ZERO).is_ok_and(|removed| removed > 0)
    }

    fn remove_leftovers(&self, age: Duration) -> std::result::Result<usize, SaveError> {
        atomic::remove_leftovers(&self.path, age, |name| name::parse(name).is_some())
    }

    fn superfluous(&self, step: u64, saved: &Path) -> Result<Vec<CheckpointFile>> {
        let mut files = self.files()?;
        files.retain(|file| file.step <= step);
        let (same, mut earlier): (Vec<_>, Vec<_>) =
            files.into_iter().partition(|file| file.step == step);
        let saved_file = same.iter().find(|file| file.path == saved).cloned();
        let replaced = same.into_iter().filter(|file| file.path != saved);
        let kept: Vec<_> = match self.best {
            Some((count, better)) => {
                let mut all: Vec<_> = earlier.iter().cloned().chain(saved_file).collect();
                best_first(&mut all, better);
                all.truncate(count);
                all
            }
            None => Vec::new(),
        };
        earlier.truncate(earlier.len().saturating_sub(self.last - 1));
        earlier.retain(|file| !kept.contains(file));
        Ok(earlier.into_iter().chain(replaced).collect())
    }
}

fn is_out_of_space(error: &SaveError) -> bool {
    match error {
        SaveError::Io { cause, .. } => {
            matches!(cause.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
        }
        SaveError::Leftover { cause, .. } => is_out_of_space(cause),
        SaveError::Indeterminate { .. } => false,
    }
}

/// Sorts the files by score, the best first, and drops those without a score.
pub(super) fn best_first(files: &mut Vec<CheckpointFile>, better: Better) {
    let key = |file: &CheckpointFile| {
        let score = file.score.filter(|score| !score.is_nan())?;
        // A larger key is better. Adding 0 turns -0 into 0.
        Some(if better == Better::Lower { -score } else { score } + 0.0)
    };
    files.retain(|file| file.score.is_some());
    files.sort_by(|a, b| {
        let by_score = key(b).partial_cmp(&key(a)).unwrap_or(Ordering::Equal);
        by_score.then(b.step.cmp(&a.step))
    });
}

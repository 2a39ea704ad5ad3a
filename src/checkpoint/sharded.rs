//! Checkpoints that several ranks save together.
//!
//! Each rank adds the same parts, and saves a share of them: what it alone has, as a part of a sharded optimizer, and
//! some of the tensors that are the same on all ranks. Rank 0 saves everything else, and writes the index when all
//! shares are there.

use std::collections::BTreeMap;
use std::iter;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::result;

use torch_files::distributed::{FolderKind, Share, SharedSave};
use torch_files::{Limits, Storage as _};
use xxhash_rust::xxh3::xxh3_64;

use crate::checkpoint::entry::{SavedBy, TensorEntry};
use crate::checkpoint::outcome::{is_saved, not_saved, panicked, saved};
use crate::checkpoint::{Checkpoint, CheckpointError, Format, Parts, manifest, torch};
use crate::error::{Error, Result, unsaveable};
use crate::optim::{self, divided};

/// The ranks that save a checkpoint together.
pub(crate) trait SavingRanks: optim::Ranks + Exchange {
    /// Returns the same ranks for one save in the background, whose communication is apart from that of the training.
    /// Such saves communicate one after the other, in the order of these calls.
    fn in_background(&self) -> Result<Box<dyn Exchange>>;
}

/// What the ranks tell each other during a save.
pub(crate) trait Exchange: Send + Sync {
    fn rank(&self) -> usize;

    /// Returns what each rank passes, if all of them have come equally far. If some pass the message of an error, fails
    /// on all ranks with that of the first of them.
    fn exchange(&self, at: &str, mine: result::Result<String, String>) -> Result<Vec<String>>;

    /// Returns whether all ranks know of an error, one of `exchange` or one that this rank has passed to it, so that
    /// they can go on to communicate.
    fn is_known_to_all(&self, error: &Error) -> bool;
}

/// Why it has no other format.
const ONLY_FOLDERS: &str = "each rank has a share of it, for which only the folders of `Format::Dcp` and \
                            `Format::Safetensors` have places: use one of them for `save_as` and \
                            `CheckpointFolder::format`, or a path that ends in `.dcp`";

/// Passed by a rank that refuses a save because another one runs.
const BUSY: &str = "busy";

impl Checkpoint {
    /// Fails on all ranks if one of them passes an error, or is about to save another checkpoint. `name` is that of the
    /// file.
    pub(super) fn agree<T>(&self, name: &str, prepared: Result<T>) -> Result<T> {
        let Some(ranks) = &self.ranks else { return prepared };
        let mine = match &prepared {
            Ok(_) => Ok(String::new()),
            Err(Error::Checkpoint(CheckpointError::Busy)) => Ok(BUSY.to_owned()),
            Err(error) => Err(error.to_string()),
        };
        let told = ranks.exchange("to begin", mine);
        let prepared = prepared?;
        // Whether a save still runs is a matter of timing.
        if told?.iter().any(|told| told == BUSY) {
            return Err(CheckpointError::Busy.into());
        }
        let lines = self.lines(name);
        let hash = xxh3_64(lines.as_bytes());
        ranks.agree("the save of a sharded checkpoint", Ok(hash), &|| lines.clone())?;
        Ok(prepared)
    }

    /// What all ranks must save alike: the name of the file, of each part and of each tensor that any rank can save.
    fn lines(&self, name: &str) -> String {
        let parts = self.parts.keys().map(String::as_str);
        let mut lines: Vec<_> = iter::once(name).chain(parts).map(str::to_owned).collect();
        self.visit_divided(&mut |part, names, entry| {
            let names = names.join(" ");
            lines.push(format!("{part} {names} {:?} {:?}", entry.kind, entry.size));
        });
        lines.join("\n")
    }

    /// Returns what this rank saves, in which the tensors that other ranks save have no elements; `None` if it is
    /// everything.
    pub(super) fn share(&self, format: Format) -> Result<Option<Self>> {
        let Some(ranks) = &self.ranks else { return Ok(None) };
        if kind_of(format).is_none() {
            return Err(unsaveable("the checkpoint", ONLY_FOLDERS).into());
        }
        let rank = optim::Ranks::rank(ranks.as_ref());
        let owners = self.owners(ranks.size());
        let share = self.mapped(&mut |part, names, entry| {
            let is_mine = match entry.saved_by {
                SavedBy::Rank0 => rank == 0,
                SavedBy::AnyRank => owners.get(&divided_with(part, names)) == Some(&rank),
                SavedBy::ThisRank => true,
            };
            Ok(if is_mine { entry.shallow_clone() } else { entry.elsewhere() })
        });
        share.map(Some)
    }

    /// Divides what any of so many ranks can save.
    fn owners(&self, ranks: usize) -> BTreeMap<Divided, usize> {
        let mut sizes = BTreeMap::new();
        self.visit_divided(&mut |part, names, entry| {
            *sizes.entry(divided_with(part, names)).or_insert(0) += entry.size_in_bytes();
        });
        let (divided_with, sizes): (Vec<_>, Vec<_>) = sizes.into_iter().unzip();
        divided_with.into_iter().zip(divided(&sizes, &mut vec![0; ranks])).collect()
    }

    /// Visits the tensors that any rank can save.
    fn visit_divided(&self, visit: &mut dyn FnMut(&str, &[&str], &TensorEntry)) {
        let visited = self.mapped(&mut |part, names, entry| {
            if entry.saved_by == SavedBy::AnyRank {
                visit(part, names, entry);
            }
            Ok(entry.elsewhere())
        });
        // Nothing in it can fail.
        drop(visited);
    }
}

/// What is saved by one rank together: a part and a name in it, either that of a tensor or of a parameter, whose state
/// is written in a form that is made of all its tensors.
type Divided = (String, String);

fn divided_with(part: &str, names: &[&str]) -> Divided {
    (part.to_owned(), names.first().copied().unwrap_or_default().to_owned())
}

/// Returns the kind of the folder that ranks save together in a format.
fn kind_of(format: Format) -> Option<FolderKind> {
    match format {
        Format::Dcp => Some(FolderKind::Distcp),
        Format::Safetensors => Some(FolderKind::Safetensors),
        Format::Torch | Format::TorchByName => None,
    }
}

/// Saves this rank's share to a folder, while the other ranks save theirs.
///
/// A rank removes what it has saved only if it knows that there will be no index: where another rank has ended, it
/// cannot know, and leaves its file to a later save.
pub(super) fn save(parts: &Parts, path: &Path, format: Format, ranks: &dyn Exchange) -> Result<()> {
    let kind = kind_of(format).ok_or_else(|| unsaveable("the checkpoint", ONLY_FOLDERS))?;
    let (begun, rank) = (begin(path, kind, ranks)?, ranks.rank());
    let saved = complete(parts, &begun, ranks);
    if let Err(error) = &saved
        && !is_saved(error)
    {
        let is_known = ranks.is_known_to_all(error);
        if is_known || rank == 0 {
            begun.remove_share(rank as u64);
        }
        if is_known {
            // Until all shares are removed.
            drop(ranks.exchange("after a failure", Ok(String::new())));
        }
        begun.remove_folder();
    }
    saved
}

/// Returns what is true on any rank, after a save has failed with this error; or what is true here, for a save by one
/// process. False if the other ranks do not know of the error, or have saved the checkpoint in spite of it.
pub(super) fn on_any_rank(here: bool, error: &Error, ranks: Option<&dyn Exchange>) -> bool {
    match ranks {
        Some(ranks) if !is_saved(error) && ranks.is_known_to_all(error) => {
            let all = ranks.exchange("to try again", Ok(here.to_string()));
            all.is_ok_and(|all| all.contains(&true.to_string()))
        }
        Some(_) => false,
        None => here,
    }
}

/// Returns the save that rank 0 begins.
fn begin(path: &Path, kind: FolderKind, ranks: &dyn Exchange) -> Result<SharedSave> {
    let is_first = ranks.rank() == 0;
    // The number of the other ranks is still to come, and nothing of theirs fails after this.
    let begun = if is_first { SharedSave::begin(path, kind) } else { SharedSave::join(path, kind) };
    let begun = begun.map_err(not_saved);
    let number = |begun: &SharedSave| begun.number().to_string();
    let numbers = exchanged(ranks, "at the number of its files", &begun, number);
    let begun = begun?;
    match numbers {
        Ok(_) if is_first => Ok(begun),
        Ok(numbers) => {
            let number = numbers.first().and_then(|number| number.parse().ok());
            let number = number.ok_or_else(|| Error::Torch("rank 0 sent no number".to_owned()))?;
            Ok(begun.with_number(number))
        }
        Err(error) => {
            begun.remove_folder();
            Err(error)
        }
    }
}

/// Saves the share, and the index on rank 0. An error of an index that is in place is that of rank 0 alone.
fn complete(parts: &Parts, begun: &SharedSave, ranks: &dyn Exchange) -> Result<()> {
    let is_first = ranks.rank() == 0;
    let share = catch_unwind(AssertUnwindSafe(|| save_share(parts, begun, ranks.rank())));
    let share = share.unwrap_or_else(|payload| Err(panicked(payload)));
    let shares = exchanged(ranks, "at the shares", &share, Clone::clone);
    share?;
    let shares = shares?;
    let finished = if is_first { finish(begun, &shares) } else { Ok(()) };
    let missing = finished.as_ref().err().filter(|error| !is_saved(error));
    let mine = missing.map_or_else(|| Ok(String::new()), |error| Err(error.to_string()));
    let told = ranks.exchange("at the index", mine);
    if is_first { finished } else { told.map(drop) }
}

/// Saves what this rank has, and returns its part of the index as text.
fn save_share(parts: &Parts, begun: &SharedSave, rank: usize) -> Result<String> {
    let share = if begun.kind() == FolderKind::Safetensors {
        manifest::layout_of_share(parts, rank == 0)?.save_share(begun, rank as u64)
    } else {
        let mut writer = torch::layout_of_folder(parts)?;
        writer.retain(|storage| storage.map_or(rank == 0, |storage| storage.is_here()));
        writer.save_share(begun, rank as u64)
    };
    let share = share.map_err(not_saved)?;
    serde_json::to_string(&share).map_err(|error| Error::Torch(error.to_string()))
}

fn finish(begun: &SharedSave, shares: &[String]) -> Result<()> {
    let parsed = shares.iter().map(|share| serde_json::from_str::<Share>(share));
    let parsed = parsed.collect::<result::Result<Vec<_>, _>>();
    let shares = parsed.map_err(|error| Error::Torch(error.to_string()))?;
    saved(begun.finish(shares, &Limits::DEFAULT))
}

/// Tells the other ranks what this one has done, or how it has failed.
fn exchanged<T>(
    ranks: &dyn Exchange,
    at: &str,
    mine: &Result<T>,
    text: impl Fn(&T) -> String,
) -> Result<Vec<String>> {
    ranks.exchange(at, mine.as_ref().map(text).map_err(ToString::to_string))
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use super::*;

    /// The first of several ranks, which nobody else talks to.
    struct Alone;

    impl Exchange for Alone {
        fn rank(&self) -> usize {
            0
        }

        fn exchange(&self, at: &str, _: result::Result<String, String>) -> Result<Vec<String>> {
            panic!("rank 0 waits {at}")
        }

        fn is_known_to_all(&self, _: &Error) -> bool {
            true
        }
    }

    /// The others go on with the training.
    #[test]
    fn rank_0_does_not_wait_after_an_index_that_is_in_place() {
        let (action, path, cause) = ("sync", "run.dcp".into(), ErrorKind::Other.into());
        let error = CheckpointError::Indeterminate { action, path, cause }.into();
        assert!(!on_any_rank(true, &error, Some(&Alone)));
        assert!(on_any_rank(true, &error, None));
    }
}

//! Matching the names in a file with those of the target: the options of a restore, and the names that it left out.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::fmt;

use crate::checkpoint::CheckpointError;
#[cfg(doc)]
use crate::checkpoint::Restore;
use crate::error::{Result, list, shown};
use crate::patterns;

/// The options of a restore.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) strict: bool,
    pub(crate) cast: bool,
    pub(crate) averages_updates: Option<u64>,
    pub(crate) names: Renames,
}

/// The renames and skips of a restore.
#[derive(Clone, Debug, Default)]
pub(crate) struct Renames {
    /// Each prefix in the file, with the prefix that replaces it.
    prefixes: Vec<(String, String)>,
    /// Patterns for names in the target.
    skipped: Vec<String>,
}

impl Renames {
    pub(crate) fn rename_prefix(&mut self, from: &str, to: &str) {
        self.prefixes.push((from.to_owned(), to.to_owned()));
    }

    pub(crate) fn skip(&mut self, patterns: &[impl AsRef<str>]) {
        self.skipped.extend(patterns.iter().map(|pattern| pattern.as_ref().to_owned()));
    }

    /// Returns whether there are neither renames nor skips.
    pub(crate) fn is_empty(&self) -> bool {
        self.prefixes.is_empty() && self.skipped.is_empty()
    }

    /// Returns the name in the target for a name in the file. The prefixes are replaced one after the other.
    pub(crate) fn of<'n>(&self, name: &'n str) -> Cow<'n, str> {
        self.prefixes.iter().fold(Cow::Borrowed(name), |name, (from, to)| {
            let renamed = name.strip_prefix(from.as_str()).map(|rest| format!("{to}{rest}"));
            renamed.map_or(name, Cow::Owned)
        })
    }

    /// Returns whether a name in the target is skipped.
    pub(crate) fn skips(&self, name: &str) -> bool {
        patterns::matches_any(&self.skipped, name)
    }

    /// Returns the names of a part, each by its name in the target. It is an error if two names become equal.
    pub(crate) fn renamed<'n>(
        &self,
        part: &str,
        all: impl Iterator<Item = &'n String>,
    ) -> std::result::Result<BTreeMap<String, &'n str>, CheckpointError> {
        let mut renamed = BTreeMap::new();
        for name in all {
            let here = self.of(name).into_owned();
            if let Some(other) = renamed.insert(here, name.as_str()) {
                let problem = format!(
                    "and `{}` would both be `{}` here; let `rename_prefix` give them different names",
                    shown(name),
                    shown(&self.of(name))
                );
                let (part, tensor) = (part.to_owned(), other.to_owned());
                return Err(CheckpointError::Tensor { part, tensor, problem });
            }
        }
        Ok(renamed)
    }
}

/// Returns whether a name is that of the batch count of a PyTorch norm. tch's norms do not count batches.
pub(crate) fn is_batch_count(name: &str, known: &HashSet<&str>) -> bool {
    let Some(module) = name.strip_suffix(BATCH_COUNT) else {
        return false;
    };
    (module.is_empty() || module.ends_with('.'))
        && STATISTICS
            .iter()
            .all(|statistic| known.contains(format!("{module}{statistic}").as_str()))
}

/// Returns the names of the batch counts that the model has in PyTorch in addition to the names in its `VarStore`.
pub(crate) fn batch_counts(known: &HashSet<&str>) -> Vec<String> {
    let modules = known.iter().filter_map(|name| name.strip_suffix(STATISTICS[0]));
    let counts = modules.map(|module| format!("{module}{BATCH_COUNT}"));
    let mut counts: Vec<_> = counts.filter(|name| is_batch_count(name, known)).collect();
    counts.retain(|name| !known.contains(name.as_str()));
    counts
}

const BATCH_COUNT: &str = "num_batches_tracked";
const STATISTICS: [&str; 2] = ["running_mean", "running_var"];

/// The names that a restore left out, each as `part/name`. The counterpart of the result of `load_state_dict`, which
/// has no `skipped_keys`. Its debug form shows the first of them, as messages do.
#[derive(Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Restored {
    /// The names that the checkpoint lacks. Their targets keep their values. Empty unless [`strict`](Restore::strict)
    /// is false.
    pub missing_keys: Vec<String>,
    /// The names that only the checkpoint has, as they are in the checkpoint. If [`strict`](Restore::strict) is true,
    /// only those of entries that were left out because nothing has taken them: those of a model that are not tensors,
    /// those beside the state of an optimizer, those of a schedule that only Python uses, such as `_step_count`,
    /// and what this crate does not support.
    pub unexpected_keys: Vec<String>,
    /// The names that [`skip`](Restore::skip) excluded.
    pub skipped_keys: Vec<String>,
}

impl fmt::Debug for Restored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { missing_keys, unexpected_keys, skipped_keys } = self;
        f.debug_struct("Restored")
            .field("missing_keys", &format_args!("{}", list(missing_keys)))
            .field("unexpected_keys", &format_args!("{}", list(unexpected_keys)))
            .field("skipped_keys", &format_args!("{}", list(skipped_keys)))
            .finish()
    }
}

impl Restored {
    /// Returns an error for missing or unexpected names of a part if `strict`, and records them otherwise.
    pub(crate) fn judge(
        &mut self,
        part: &str,
        strict: bool,
        missing: Vec<String>,
        unexpected: Vec<String>,
    ) -> Result<()> {
        if strict && !(missing.is_empty() && unexpected.is_empty()) {
            let part = part.to_owned();
            return Err(CheckpointError::Keys { part, missing, unexpected }.into());
        }
        self.missing_keys.extend(full(part, missing));
        self.unexpected_keys.extend(full(part, unexpected));
        Ok(())
    }

    /// Records names of a part whose entries nothing could take.
    pub(crate) fn leave_out(&mut self, part: &str, left_out: Vec<String>) {
        self.unexpected_keys.extend(full(part, left_out));
    }

    /// Strikes out what was restored under a name of its own: `optimizer/loss_scaler` by `optimizer.loss_scaler`.
    pub(crate) fn strike_out(&mut self, part: &str) {
        self.unexpected_keys.retain(|key| key.replacen('/', ".", 1) != part);
    }

    /// Records names of a part that were skipped.
    pub(crate) fn skip(&mut self, part: &str, skipped: Vec<String>) {
        self.skipped_keys.extend(full(part, skipped));
    }

    /// Adds the names of another one.
    pub(crate) fn extend(&mut self, other: Self) {
        let Self { missing_keys, unexpected_keys, skipped_keys } = other;
        self.missing_keys.extend(missing_keys);
        self.unexpected_keys.extend(unexpected_keys);
        self.skipped_keys.extend(skipped_keys);
    }
}

fn full(part: &str, names: Vec<String>) -> impl Iterator<Item = String> {
    names.into_iter().map(move |name| format!("{part}/{name}"))
}

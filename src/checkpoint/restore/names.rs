//! Matching the names in a file with those of the target, and skipping some of them.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};

use crate::checkpoint::CheckpointError;
use crate::error::shown;
use crate::patterns;

/// The renames and skips of a restore.
#[derive(Clone, Debug, Default)]
pub(crate) struct Names {
    /// Each prefix in the file, with the prefix that replaces it.
    prefixes: Vec<(String, String)>,
    /// Patterns for names in the target.
    skipped: Vec<String>,
}

impl Names {
    pub(crate) fn rename_prefix(&mut self, from: &str, to: &str) {
        self.prefixes.push((from.to_owned(), to.to_owned()));
    }

    pub(crate) fn skip(&mut self, patterns: &[impl AsRef<str>]) {
        self.skipped.extend(patterns.iter().map(|pattern| pattern.as_ref().to_owned()));
    }

    /// Whether there are neither renames nor skips.
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

    /// Whether a name in the target is skipped.
    pub(crate) fn skips(&self, name: &str) -> bool {
        patterns::matches_any(&self.skipped, name)
    }

    /// Returns the names of a part, each by its name in the target. It is an error if two names become equal.
    pub(crate) fn renamed<'n>(
        &self,
        part: &str,
        all: impl Iterator<Item = &'n String>,
    ) -> Result<BTreeMap<String, &'n str>, CheckpointError> {
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

/// Whether a name is that of the batch count of a PyTorch norm. tch's norms do not count batches.
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

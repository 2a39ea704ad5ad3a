//! Which names of a file stand for which of a model or an optimizer, and which are left out.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};

use crate::checkpoint::CheckpointError;
use crate::names;

/// What was asked for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Names {
    /// Beginnings in the file, and those here.
    prefixes: Vec<(String, String)>,
    /// Patterns of names here.
    skipped: Vec<String>,
}

impl Names {
    pub(crate) fn rename_prefix(&mut self, from: &str, to: &str) {
        self.prefixes.push((from.to_owned(), to.to_owned()));
    }

    pub(crate) fn skip(&mut self, patterns: &[impl AsRef<str>]) {
        self.skipped.extend(patterns.iter().map(|pattern| pattern.as_ref().to_owned()));
    }

    /// Whether nothing was asked for.
    pub(crate) fn is_empty(&self) -> bool {
        self.prefixes.is_empty() && self.skipped.is_empty()
    }

    /// What a name of the file is here: the first prefix that fits is replaced.
    pub(crate) fn of<'n>(&self, name: &'n str) -> Cow<'n, str> {
        let renamed = self.prefixes.iter().find_map(|(from, to)| {
            let rest = name.strip_prefix(from.as_str())?;
            Some(Cow::Owned(format!("{to}{rest}")))
        });
        renamed.unwrap_or(Cow::Borrowed(name))
    }

    /// Whether a name here is left as it is.
    pub(crate) fn skips(&self, name: &str) -> bool {
        names::matches_any(&self.skipped, name)
    }

    /// The names of a part by what they are here. Refuses two that become one.
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
                    "and `{name}` would both be `{}` here; let `rename_prefix` give them different names",
                    self.of(name)
                );
                let (part, tensor) = (part.to_owned(), other.to_owned());
                return Err(CheckpointError::Tensor { part, tensor, problem });
            }
        }
        Ok(renamed)
    }
}

/// Whether a name is that of the batches that a norm of Python's has counted, which tch's do not count.
pub(crate) fn is_batch_count(name: &str, known: &HashSet<&str>) -> bool {
    let Some(module) = name.strip_suffix(BATCH_COUNT) else {
        return false;
    };
    (module.is_empty() || module.ends_with('.'))
        && STATISTICS
            .iter()
            .all(|statistic| known.contains(format!("{module}{statistic}").as_str()))
}

/// The names of the counts of batches that a model of Python's has beside the names of a VarStore.
pub(crate) fn batch_counts(known: &HashSet<&str>) -> Vec<String> {
    let modules = known.iter().filter_map(|name| name.strip_suffix(STATISTICS[0]));
    let counts = modules.map(|module| format!("{module}{BATCH_COUNT}"));
    let mut counts: Vec<_> = counts.filter(|name| is_batch_count(name, known)).collect();
    counts.retain(|name| !known.contains(name.as_str()));
    counts
}

const BATCH_COUNT: &str = "num_batches_tracked";
const STATISTICS: [&str; 2] = ["running_mean", "running_var"];

//! The result of a restore: the names that it left out.

use std::fmt;

use crate::checkpoint::CheckpointError;
#[cfg(doc)]
use crate::checkpoint::Restore;
use crate::error::{Result, list};

/// The names that a restore left out, each as `part/name`. The counterpart of the result of `load_state_dict`, which
/// has no `skipped_keys`. Its debug form shows the first of them, as messages do.
#[derive(Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Restored {
    /// The names that the checkpoint lacks. Their targets keep their values. Empty unless [`strict`](Restore::strict)
    /// is false.
    pub missing_keys: Vec<String>,
    /// The names that only the checkpoint has, as they are in the checkpoint. If [`strict`](Restore::strict) is true,
    /// only those of entries that were left out because nothing could take them: those of a model that are not tensors,
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

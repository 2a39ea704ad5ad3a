//! What a restore left out.

use crate::checkpoint::CheckpointError;
#[cfg(doc)]
use crate::checkpoint::Restore;
use crate::error::Result;

/// What a restore left out, as `part/name`. PyTorch's counterpart is the result of `load_state_dict`, which has no
/// `skipped_keys`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Restored {
    /// Names that the checkpoint lacks; they keep their values. Empty unless [`strict`](Restore::strict) is false.
    pub missing_keys: Vec<String>,
    /// Names that only the checkpoint has, as it has them. Empty unless [`strict`](Restore::strict) is false.
    pub unexpected_keys: Vec<String>,
    /// Names that [`skip`](Restore::skip) has left as they are.
    pub skipped_keys: Vec<String>,
}

impl Restored {
    /// Refuses names of a part that do not fit, or notes them.
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

    /// Notes names of a part that were skipped.
    pub(crate) fn skip(&mut self, part: &str, skipped: Vec<String>) {
        self.skipped_keys.extend(full(part, skipped));
    }

    /// Adds all that another one has.
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

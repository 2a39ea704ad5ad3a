//! Flags for infinities and NaNs in gradients, as far as the host has them.

use crate::ffi::FoundInf;

/// Whether any of the flags is set; `None` if the host does not have the answer.
pub(crate) fn overflow<'a>(found: impl IntoIterator<Item = &'a FoundInf>) -> Option<bool> {
    let mut known = Some(false);
    for flag in found {
        match flag.host {
            Some(true) => return Some(true),
            Some(false) => {}
            None => known = None,
        }
    }
    known
}

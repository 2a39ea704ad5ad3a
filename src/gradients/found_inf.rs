//! What the host knows of infinities and NaNs in gradients.

use crate::ffi::FoundInf;

/// Whether any of the flags is set, where the host knows it.
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

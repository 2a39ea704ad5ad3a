//! Detecting changes of gradients.

use crate::ffi::Gradient;

/// How a gradient differs from the one that was unscaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    None,
    /// The same tensor with other values, as after clipping or a backward.
    Numbers,
    /// Another tensor, or one where there was none; the text says which.
    Replaced(&'static str),
}

/// Compares a gradient with `before`, its description after unscaling; `None` for a parameter that was added since.
pub(crate) fn change(before: Option<&Gradient>, now: &Gradient) -> Change {
    let before = before.copied().unwrap_or_default();
    if !now.exists() {
        // No step applies a missing gradient.
        Change::None
    } else if !before.exists() {
        Change::Replaced("appeared")
    } else if before.identity() != now.identity() {
        Change::Replaced("was replaced")
    } else if before.version() != now.version() {
        Change::Numbers
    } else {
        Change::None
    }
}

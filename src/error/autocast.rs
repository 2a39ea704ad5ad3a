//! The errors of autocast regions.

use tch::{Device, Kind};

/// The errors of opening an autocast region.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AutocastError {
    /// Autocast does not support the dtype.
    #[error(
        "autocast on {device:?} cannot run in {dtype:?}; use Kind::BFloat16 or Kind::Half, or switch the region off with `enabled(false)`"
    )]
    Dtype {
        /// The device of the region.
        device: Device,
        /// The requested dtype.
        dtype: Kind,
    },

    /// The thread is ending, and its stack of regions has been destroyed.
    #[error(
        "the thread is ending: open autocast regions before its thread-local values are destroyed"
    )]
    ThreadEnding,
}

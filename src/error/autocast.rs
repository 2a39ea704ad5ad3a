//! Errors of autocast regions.

use tch::{Device, Kind};

/// Why an autocast region was not opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AutocastError {
    /// Autocast has no such dtype.
    #[error(
        "autocast on {device:?} cannot run in {dtype:?}; use Kind::BFloat16 or Kind::Half, or switch the region off with `enabled(false)`"
    )]
    Dtype {
        /// The device of the region.
        device: Device,
        /// The dtype asked for.
        dtype: Kind,
    },

    /// The thread is ending and keeps no autocast state any more.
    #[error(
        "the thread is ending: open autocast regions before its thread-local values are destroyed"
    )]
    ThreadEnding,
}

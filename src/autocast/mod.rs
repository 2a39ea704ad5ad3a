//! Autocast regions, inside which libtorch runs the operations that are safe in low precision in bf16 or fp16.
//!
//! A region is opened with [`autocast()`](crate::autocast()) or, with options, with [`Autocast`](crate::Autocast). This
//! module has the guard of a region, the [`Plan`] that says how its operators run, the autocast state of a thread, and
//! the functions that read it.
//!
//! The autocast state belongs to a thread. Every region is recorded on a stack of its thread, so that guards may be
//! dropped in any order, and the previous state is restored after a panic, too.

mod overrides;
mod plan;
pub(crate) mod region;
mod stack;
mod state;

pub use crate::error::AutocastError;
pub use plan::{Plan, Platform, Rule, RunAs};
pub use region::{AutocastGuard, LOG_PROBABILITIES};
pub(crate) use stack::callback;
#[cfg(feature = "distributed")]
pub(crate) use stack::first_dtype;
pub(crate) use state::forgetting_casts;
pub use state::{
    AutocastState, autocast_dtype, clear_autocast_cache, is_autocast_available, is_autocast_enabled,
};

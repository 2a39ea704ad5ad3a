//! Autocast regions: inside one, libtorch runs the operations that are safe in low precision in bf16 or fp16.
//!
//! A region is opened with [`autocast()`](crate::autocast()) or, with options, with [`Autocast`](crate::Autocast). This
//! module has its guard, the state of a thread, and the functions that ask for it.
//!
//! The state is the thread's. Every region that this module opens stands on a per-thread stack, so that guards may be
//! dropped in any order and a panic leaves nothing behind.

pub(crate) mod region;
mod stack;
mod state;

pub use crate::error::AutocastError;
pub use region::AutocastGuard;
pub(crate) use stack::callback;
pub(crate) use state::forgetting_casts;
pub use state::{
    AutocastState, autocast_dtype, clear_autocast_cache, is_autocast_available,
    is_autocast_enabled, is_cache_enabled,
};

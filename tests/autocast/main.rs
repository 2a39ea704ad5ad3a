//! Autocast regions: what they set, and that the thread is as it was when they are gone.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]
#![allow(clippy::disallowed_methods, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
mod common;

mod cache;
mod callbacks;
mod guards;
mod regions;
mod threads;

use std::sync::{Mutex, MutexGuard, PoisonError};

use tch::{Device, Kind};
use tch_amp::autocast::{autocast_dtype, is_autocast_enabled, is_cache_enabled};

/// What a thread's autocast state on the CPU is: enabled, dtype, cache.
type Seen = (bool, Kind, bool);

fn seen() -> Seen {
    let dtype = autocast_dtype(Device::Cpu).expect("the CPU has a dtype");
    (is_autocast_enabled(Device::Cpu), dtype, is_cache_enabled())
}

/// The state of a thread that nobody has touched.
const OUTSIDE: Seen = (false, Kind::BFloat16, true);

/// The weight cache belongs to the process: a test that looks at it must have it to itself.
fn alone() -> MutexGuard<'static, ()> {
    static CACHE: Mutex<()> = Mutex::new(());
    CACHE.lock().unwrap_or_else(PoisonError::into_inner)
}

//! Autocast regions: what they set, and that they restore the thread's state.

mod cache;
mod callbacks;
mod guards;
mod losses;
mod operations;
mod overrides;
mod own_arithmetic;
mod plans;
mod porting;
mod programs;
mod regions;
mod threads;

use std::sync::{Mutex, MutexGuard, PoisonError};

use tch::{Device, Kind};
use tch_amp::autocast::{AutocastState, autocast_dtype, is_autocast_enabled};

/// A thread's autocast state on the CPU: enabled, dtype, cache.
type Seen = (bool, Kind, bool);

fn seen() -> Seen {
    let dtype = autocast_dtype(Device::Cpu).expect("the CPU has a dtype");
    let cache = AutocastState::current().expect("the state can be read").is_cache_enabled();
    (is_autocast_enabled(Device::Cpu), dtype, cache)
}

/// The initial state of a thread.
const OUTSIDE: Seen = (false, Kind::BFloat16, true);

/// The weight cache belongs to the process: tests that depend on it must not run at the same time.
fn alone() -> MutexGuard<'static, ()> {
    static CACHE: Mutex<()> = Mutex::new(());
    CACHE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `test` on each device, with the cache for itself.
fn for_each_device_alone(test: impl Fn(Device)) {
    let _alone = alone();
    testkit::for_each_device(test);
}

//! Captured iterations: replays beside eager iterations, what is refused, and what a replay costs.

mod between;
mod costs;
mod planted;
mod records;
mod refused;
mod replays;
mod schedules;
mod training;

use std::sync::{Mutex, MutexGuard, PoisonError};

use tch::Device;
use tch_amp::{Error, Result};

use testkit::simulation;

/// A CUDA device that has graphs. One test at a time has it, because streams of libtorch belong to the whole process,
/// and one that is captured must not be given other work.
#[derive(Debug)]
struct Gpu {
    device: Device,
    _alone: MutexGuard<'static, ()>,
}

/// A CUDA device that has graphs: on null CUDA or a real GPU. Otherwise prints the reason.
fn gpu() -> Option<Gpu> {
    static ALONE: Mutex<()> = Mutex::new(());
    if simulation::is_model() {
        testkit::skipped("graphs need null CUDA: run `cargo xtask null-cuda --values cargo test`");
        return None;
    }
    let alone = || ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    testkit::cuda_or_skip().then(|| Gpu { device: Device::Cuda(0), _alone: alone() })
}

/// The message of a refusal.
#[track_caller]
fn refusal<T>(result: Result<T>) -> String {
    match result {
        Err(error @ (Error::Capture { .. } | Error::ChangedSinceCapture { .. })) => {
            error.to_string()
        }
        Err(error) => panic!("another error: {error}"),
        Ok(_) => panic!("it was not refused"),
    }
}

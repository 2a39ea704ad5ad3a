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
use tch_amp::graph::Captured;
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

/// Asserts that a call is refused in or by a graph, with this text.
#[track_caller]
fn assert_refuses<T>(result: Result<T>, text: &str) {
    let said = refusal(result);
    assert!(said.contains(text), "`{text}` is not in: {said}");
}

/// Asserts that a graph refuses the fourth iteration, the first that it captures, with this text.
#[track_caller]
fn assert_refuses_capture(
    device: Device,
    text: &str,
    mut iteration: impl FnMut(usize) -> Result<()>,
) {
    let mut graph = Captured::new(device).unwrap();
    let mut take = |i| graph.replay(|| iteration(i)).map(drop);
    (0..3).for_each(|i| take(i).unwrap());
    assert_refuses(take(3), text);
}

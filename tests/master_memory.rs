//! The table of bytes in the documentation of `MasterWeights`, beside what the system gives a process that trains.
//!
//! In a process of its own: other tests would be counted, too.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod common;
#[path = "../benches/common/master_memory.rs"]
mod held;
#[path = "../benches/common/memory.rs"]
mod memory;

use held::{Held, Setup, TENSORS, measure, setups};

/// Bytes for each number. A training has up to 14 tensors, each in whole pages with one for the allocator: 1.8 MB where
/// pages are 64 KiB, and the heap has some more.
const SLACK: f64 = 0.06;

/// Peaks are counted by the kernel, which may be behind by some MiB. Scratch memory of two bytes for each number of one
/// tensor would be twice this.
const PEAK_SLACK: f64 = 0.5;

#[test]
fn every_way_to_train_holds_the_bytes_that_the_documentation_says() {
    tch::set_num_threads(1);
    // Once for whatever the first step makes for good.
    if measure(&setups()[0]).is_none() {
        common::skipped("memory is measured where /proc/self/smaps_rollup is");
        return;
    }
    for setup in setups() {
        let held = measure(&setup).expect("memory was measured before");
        println!("{:<42} {held:.3?}", setup.name);
        check(&setup, held);
    }
}

fn check(setup: &Setup, Held { held, step, unscaling, later }: Held) {
    let name = setup.name;
    assert!((held - setup.stated).abs() < SLACK, "{name} holds {held}, not {}", setup.stated);
    // Two bytes more for each gradient that `unscale_` makes f32, and it stays so.
    let wider = if setup.widens() { 2.0 } else { 0.0 };
    let stated = setup.stated + wider;
    assert!((later - stated).abs() < SLACK, "{name} holds {later} later, not {stated}");
    if step.is_nan() || unscaling.is_nan() {
        common::skipped("peaks are measured where /proc/self/clear_refs can be written");
        return;
    }
    assert!(step < PEAK_SLACK, "{name}: a step needs {step} beside that");
    // One tensor's gradient is there twice meanwhile.
    let twice = wider * (1.0 + 1.0 / TENSORS as f64);
    assert!((unscaling - twice).abs() < PEAK_SLACK, "{name}: unscaling needs {unscaling}");
}

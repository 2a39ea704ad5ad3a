//! The table of bytes in the documentation of `MasterWeights`, compared with the memory that a training process holds.
//!
//! This is a program of its own, because the memory of other tests would be counted, too.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

#[path = "../benches/common/master_memory.rs"]
mod held;
#[path = "../benches/common/memory.rs"]
mod memory;

use held::{Held, Setup, TENSORS, measure, setups};

/// Bytes per number. A training run has up to 14 tensors. Each has whole pages, one of them for the allocator: 1.8 MB
/// if pages are 64 KiB. The rest is for the heap.
const SLACK: f64 = 0.06;

/// The kernel's count of the peak may lag by some MiB. Scratch memory of two bytes for each number of one tensor would
/// be twice this.
const PEAK_SLACK: f64 = 0.5;

#[test]
fn every_way_to_train_holds_the_documented_bytes() {
    tch::set_num_threads(1);
    // The first measurement allocates what the process then keeps.
    if measure(&setups()[0]).is_none() {
        testkit::skipped("measuring memory needs /proc/self/smaps_rollup");
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
    // Gradients that `unscale_` converts to f32 take two more bytes each from then on.
    let wider = if setup.widens() { 2.0 } else { 0.0 };
    let stated = setup.stated + wider;
    assert!((later - stated).abs() < SLACK, "{name} later holds {later}, not {stated}");
    if step.is_nan() || unscaling.is_nan() {
        testkit::skipped("measuring peaks needs a writable /proc/self/clear_refs");
        return;
    }
    assert!(step < PEAK_SLACK, "{name}: a step needs {step} more");
    // While one tensor's gradient is converted, both copies exist.
    let twice = wider * (1.0 + 1.0 / TENSORS as f64);
    assert!((unscaling - twice).abs() < PEAK_SLACK, "{name}: unscaling needs {unscaling}");
}

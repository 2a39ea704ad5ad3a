//! What every integration test shares: devices, the Python oracle, reproducible random numbers.
#![allow(dead_code, reason = "each test file uses its own part")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

pub mod bits;
pub mod files;
pub mod functions;
pub mod python;
pub mod rng;
pub mod simulation;

use std::io::Write;
use std::sync::Once;

use tch::{Cuda, Device, Kind, Tensor};

/// Runs `test` on the CPU and, where CUDA is usable, on the first CUDA device.
///
/// Without CUDA the skip is printed; `TCH_AMP_REQUIRE_CUDA=1` turns it into a failure.
pub fn for_each_device(test: impl Fn(Device)) {
    test(Device::Cpu);
    if cuda_or_skip() {
        test(Device::Cuda(0));
    }
}

/// Tells whether CUDA tests can run here, and says so loudly when they cannot.
pub fn cuda_or_skip() -> bool {
    let available = Cuda::is_available();
    if !available {
        assert!(!is_set("TCH_AMP_REQUIRE_CUDA"), "CUDA is required here and not usable");
        // Once a program, not once a test.
        static SAID: Once = Once::new();
        SAID.call_once(|| skipped("and others, on CUDA: no usable CUDA device"));
    }
    available
}

/// Says on the terminal what is not tested. `eprintln!` would be caught by the test runner.
pub fn skipped(what: &str) {
    let test = std::thread::current();
    let line = format!("SKIPPED {}: {what}\n", test.name().unwrap_or_default());
    std::io::stderr().write_all(line.as_bytes()).expect("stderr takes a line");
}

/// Tells whether the environment variable `name` is 1.
pub fn is_set(name: &str) -> bool {
    std::env::var(name).is_ok_and(|value| value == "1")
}

/// The elements of a floating tensor as `f64`, in row-major order.
pub fn to_f64(tensor: &Tensor) -> Vec<f64> {
    let flat = tensor.detach().to_device(Device::Cpu).to_kind(Kind::Double).contiguous().view(-1);
    Vec::<f64>::try_from(flat).expect("a flat f64 tensor is a vector")
}

/// The memory of this process in RAM, in bytes; `None`, with a printed reason, where there is no `/proc`.
pub fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok();
    let kib = status.as_deref().and_then(|status| {
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
        line.trim().strip_suffix(" kB")?.parse::<u64>().ok()
    });
    if kib.is_none() {
        skipped("memory is measured where /proc/self/status is");
    }
    kib.map(|kib| kib << 10)
}

//! What the integration tests share: devices, the Python oracle, reproducible random numbers.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]
#![allow(
    clippy::new_without_default,
    reason = "a default value would not say that a folder is made"
)]
#![allow(clippy::should_implement_trait, reason = "`next` of a generator has no end")]

pub mod bits;
pub mod checkpoints;
pub mod descent;
pub mod files;
pub mod functions;
pub mod handmade;
pub mod html;
pub mod low_bit;
pub mod optimizers;
pub mod own_arithmetic;
pub mod plain;
pub mod programs;
pub mod python;
pub mod ranks;
pub mod refused;
pub mod rng;
pub mod rows;
pub mod simulation;
pub mod tensors;
pub mod ulps;

use std::fmt::Display;
use std::io::Write;
use std::sync::Once;

use tch::{Cuda, Device, Kind, Tensor};

/// Runs `test` on each of the [`devices`], and prints the device on which it failed.
pub fn for_each_device(test: impl Fn(Device)) {
    for device in devices() {
        let _case = Case(format!("on {device:?}"));
        test(device);
    }
}

/// What a test is trying; prints it if the test panics.
#[derive(Debug)]
pub struct Case(pub String);

impl Drop for Case {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.0);
        }
    }
}

/// The CPU and, where CUDA is usable, the first two CUDA devices.
///
/// Device 0 is always the current one, so code that uses the current device instead of that of its tensors fails on
/// device 1. Without CUDA, the skip is printed; `TCH_AMP_REQUIRE_CUDA=1` turns it into a failure.
pub fn devices() -> Vec<Device> {
    let mut devices = vec![Device::Cpu];
    devices.extend(gpus());
    devices
}

/// The first two CUDA devices. If there is only one, a message says that tests on a second device are skipped.
pub fn gpus() -> Vec<Device> {
    if !cuda_or_skip() {
        return Vec::new();
    }
    if Cuda::device_count() < 2 {
        static SAID: Once = Once::new();
        SAID.call_once(|| skipped("and others, on a second CUDA device: there is only one"));
        return vec![Device::Cuda(0)];
    }
    vec![Device::Cuda(0), Device::Cuda(1)]
}

/// The CUDA devices whose results are those of the CPU's kernels: simulated ones, and those of null CUDA. They can be
/// compared bit by bit with what Python computes on the CPU. On a real GPU, whose kernels round differently, the list
/// is empty and the reason is printed.
pub fn gpus_that_round_as_the_cpu() -> Vec<Device> {
    let gpus = gpus();
    if gpus.is_empty() || simulation::rounds_as_the_cpu() {
        return gpus;
    }
    skipped("the bits of a GPU's kernels are not those of the CPU's");
    Vec::new()
}

/// Whether CUDA tests can run here; prints a message if they cannot.
pub fn cuda_or_skip() -> bool {
    let available = Cuda::is_available();
    if !available {
        assert!(
            !is_set("TCH_AMP_REQUIRE_CUDA"),
            "CUDA is required (TCH_AMP_REQUIRE_CUDA), but not usable"
        );
        // Once per program, not once per test.
        static SAID: Once = Once::new();
        SAID.call_once(|| skipped("and others, on CUDA: no usable CUDA device"));
    }
    available
}

/// Prints to the terminal what is not tested. The test runner would capture the output of `eprintln!`.
pub fn skipped(what: &str) {
    let test = std::thread::current();
    let line = format!("SKIPPED {}: {what}\n", test.name().unwrap_or_default());
    std::io::stderr().write_all(line.as_bytes()).expect("stderr is writable");
}

/// Whether the environment variable `name` is 1.
pub fn is_set(name: &str) -> bool {
    std::env::var(name).is_ok_and(|value| value == "1")
}

/// Asserts that a call has failed, with this text in its message.
#[track_caller]
pub fn assert_says<T>(result: Result<T, impl Display>, text: &str) {
    let Err(error) = result else { panic!("it has not failed, and should say: {text}") };
    let message = error.to_string();
    assert!(message.contains(text), "`{text}` is not in: {message}");
}

/// The elements of a floating-point tensor as `f64`, in row-major order.
pub fn to_f64(tensor: &Tensor) -> Vec<f64> {
    let flat = tensor.detach().to_device(Device::Cpu).to_kind(Kind::Double).contiguous().view(-1);
    Vec::<f64>::try_from(flat).expect("a flat f64 tensor is a vector")
}

/// The resident memory of this process in bytes. Where there is no `/proc`, returns `None` and prints the reason.
pub fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok();
    let kib = status.as_deref().and_then(|status| {
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
        line.trim().strip_suffix(" kB")?.parse::<u64>().ok()
    });
    if kib.is_none() {
        skipped("measuring memory needs /proc/self/status");
    }
    kib.map(|kib| kib << 10)
}

//! What every integration test shares: devices, the Python oracle, reproducible random numbers.
#![allow(dead_code, reason = "each test file uses its own part")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

pub mod bits;
pub mod python;
pub mod rng;

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
        assert!(
            !required("TCH_AMP_REQUIRE_CUDA"),
            "CUDA is required here and not usable"
        );
        eprintln!("SKIPPED on CUDA: no usable CUDA device");
    }
    available
}

/// Tells whether the environment variable `name` asks for a skip to be a failure.
pub fn required(name: &str) -> bool {
    std::env::var(name).is_ok_and(|value| value == "1")
}

/// The elements of a floating tensor as `f64`, in row-major order.
pub fn to_f64(tensor: &Tensor) -> Vec<f64> {
    let flat = tensor
        .detach()
        .to_device(Device::Cpu)
        .to_kind(Kind::Double)
        .contiguous()
        .view(-1);
    Vec::<f64>::try_from(flat).expect("a flat f64 tensor is a vector")
}

/// The bits of the elements of an f32 tensor, in row-major order: equality of these is bitwise equality.
pub fn f32_bits(tensor: &Tensor) -> Vec<u32> {
    assert_eq!(tensor.kind(), Kind::Float);
    let flat = tensor.detach().to_device(Device::Cpu).contiguous().view(-1);
    let values = Vec::<f32>::try_from(flat).expect("a flat f32 tensor is a vector");
    values.into_iter().map(f32::to_bits).collect()
}

/// The memory of this process in RAM, in bytes; `None`, with a printed reason, where there is no `/proc`.
pub fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok();
    let kib = status.as_deref().and_then(|status| {
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:"))?;
        line.trim().strip_suffix(" kB")?.parse::<u64>().ok()
    });
    if kib.is_none() {
        eprintln!("SKIPPED: memory is measured where /proc/self/status is");
    }
    kib.map(|kib| kib << 10)
}

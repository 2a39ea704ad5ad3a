//! Whether a device computes in bf16, and how precise its matrix products are. [`Amp::advice`](crate::Amp::advice) says
//! how fast it is in each precision.

mod choice;
mod matmul;

use tch::{Cuda, Device};

use crate::device::check_usable;
use crate::error::Result;
use crate::ffi;

pub(crate) use choice::{Gain, Gains};
pub use matmul::{MatmulPrecision, MatmulPrecisionGuard, ReducedPrecisionReduction};

/// Returns whether a device computes in bf16 by instructions of its own: NVIDIA's GPUs from Ampere (compute capability
/// 8.0) on, CPUs with AVX512-BF16 or with the bf16 instructions of ARM. Elsewhere libtorch emulates bf16, without a
/// word and usually slower than f32; on MPS, which libtorch cannot be asked about, the answer is `false`. Corresponds
/// to `torch.cuda.is_bf16_supported(including_emulation=False)`.
///
/// # Errors
///
/// [`Error::DeviceUnavailable`](crate::Error::DeviceUnavailable) if the device cannot be used here.
///
/// # Examples
///
/// ```
/// use tch::Device;
/// use tch_amp::precision::bf16_is_native;
///
/// if !bf16_is_native(Device::cuda_if_available())? {
///     println!("bf16 is emulated here: use fp16 on a GPU, and f32 on a CPU");
/// }
/// # Ok::<(), tch_amp::Error>(())
/// ```
pub fn bf16_is_native(device: Device) -> Result<bool> {
    check_usable(device)?;
    match device {
        Device::Cpu => Ok(cpu_has_bf16()),
        Device::Cuda(index) => ffi::cuda_has_bf16(index),
        Device::Mps | Device::Vulkan => Ok(false),
    }
}

#[cfg(target_arch = "x86_64")]
fn cpu_has_bf16() -> bool {
    std::is_x86_feature_detected!("avx512bf16")
}

#[cfg(target_arch = "aarch64")]
fn cpu_has_bf16() -> bool {
    std::arch::is_aarch64_feature_detected!("bf16")
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn cpu_has_bf16() -> bool {
    false
}

/// Waits for a GPU.
pub(crate) fn synchronize(device: Device) {
    if let Device::Cuda(index) = device {
        Cuda::synchronize(index as i64);
    }
}

//! Which devices can be used in this process, and why others cannot.

use lazy_static::lazy_static;
use tch::{Cuda, Device};

use crate::error::{Error, Result};
use crate::ffi;

lazy_static! {
    /// Why CUDA cannot be used in this process. Determined once, since a driver does not appear or vanish while a
    /// process runs.
    static ref CUDA_PROBLEM: Option<String> = cuda_problem();
}

fn cuda_problem() -> Option<String> {
    if Cuda::is_available() {
        return None;
    }
    if !ffi::cuda_is_linked() {
        return Some(
            "this program was built with a libtorch that has no CUDA; set LIBTORCH to a CUDA build and rebuild"
                .to_owned(),
        );
    }
    if let Err(error) = ffi::cuda_initialize() {
        return Some(error.to_string());
    }
    Some("libtorch finds no CUDA device; check the driver with nvidia-smi".to_owned())
}

/// Returns an error, with the reason, if a device cannot be used in this process.
pub(crate) fn check_usable(device: Device) -> Result<()> {
    let reason = match device {
        Device::Cpu => return Ok(()),
        Device::Cuda(index) => match CUDA_PROBLEM.as_ref() {
            Some(problem) => problem.clone(),
            None if (index as i64) < Cuda::device_count() => return Ok(()),
            None => format!(
                "libtorch finds {} CUDA devices; use an index below that",
                Cuda::device_count()
            ),
        },
        Device::Mps if tch::utils::has_mps() => return Ok(()),
        Device::Mps => "this libtorch has no MPS; use the CPU or CUDA".to_owned(),
        Device::Vulkan => return ffi::device_type(device).map(drop),
    };
    Err(Error::DeviceUnavailable { device, reason })
}

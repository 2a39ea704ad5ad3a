//! Which devices can be used here, and why not.

use lazy_static::lazy_static;
use tch::{Cuda, Device, Kind};

use crate::error::{Error, Result};
use crate::ffi;

lazy_static! {
    /// Why CUDA cannot be used in this process, asked once: a driver does not come and go.
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

/// Refuses a device that cannot be used in this process, with the reason.
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
        Device::Vulkan => "libtorch has no autocast for Vulkan; use the CPU or CUDA".to_owned(),
    };
    Err(Error::DeviceUnavailable { device, reason })
}

/// The number of `c10::DeviceType` for the devices that have autocast.
pub(crate) fn device_type(device: Device) -> Result<i8> {
    match device {
        Device::Cpu => Ok(0),
        Device::Cuda(_) => Ok(1),
        Device::Mps => Ok(13),
        Device::Vulkan => check_usable(device).map(|()| 10),
    }
}

/// The number of `c10::ScalarType` for the floating kinds.
pub(crate) fn dtype_code(kind: Kind) -> Option<i8> {
    match kind {
        Kind::Half => Some(5),
        Kind::Float => Some(6),
        Kind::Double => Some(7),
        Kind::BFloat16 => Some(15),
        _ => None,
    }
}

/// The floating kind with a number of `c10::ScalarType`.
pub(crate) fn dtype_kind(code: i8) -> Result<Kind> {
    [Kind::Half, Kind::Float, Kind::Double, Kind::BFloat16]
        .into_iter()
        .find(|kind| dtype_code(*kind) == Some(code))
        .ok_or_else(|| Error::Torch(format!("autocast has the unknown dtype {code}")))
}

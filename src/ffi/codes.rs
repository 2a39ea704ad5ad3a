//! libtorch's numbers for types of devices and for dtypes.

use tch::{Device, Kind};

use crate::error::{Error, Result};

/// Returns the number of `c10::DeviceType` for a device that has autocast, and an error for others.
pub(crate) fn device_type(device: Device) -> Result<i8> {
    match device {
        Device::Cpu => Ok(0),
        Device::Cuda(_) => Ok(1),
        Device::Mps => Ok(13),
        Device::Vulkan => {
            let reason = "libtorch has no autocast for Vulkan; use the CPU or CUDA".to_owned();
            Err(Error::DeviceUnavailable { device, reason })
        }
    }
}

/// Returns the number of `c10::ScalarType` for a floating dtype.
pub(crate) fn dtype_code(kind: Kind) -> Option<i8> {
    match kind {
        Kind::Half => Some(5),
        Kind::Float => Some(6),
        Kind::Double => Some(7),
        Kind::BFloat16 => Some(15),
        _ => None,
    }
}

/// Returns the floating dtype for a number of `c10::ScalarType`.
pub(crate) fn dtype_kind(code: i8) -> Result<Kind> {
    kind_of(code).ok_or_else(|| Error::Torch(format!("autocast has the unknown dtype {code}")))
}

/// Returns the floating dtype for a number of `c10::ScalarType`, or `None` for others.
pub(crate) fn kind_of(code: i8) -> Option<Kind> {
    [Kind::Half, Kind::Float, Kind::Double, Kind::BFloat16]
        .into_iter()
        .find(|kind| dtype_code(*kind) == Some(code))
}

//! The states of libtorch's random number generators.

#![forbid(unsafe_code)]

use tch::{Device, Tensor};

use crate::device::check_usable;
use crate::error::Result;
use crate::ffi;

/// Returns the state of a device's default random number generator, which dropout, `randn` and `randperm` use: uint8,
/// on the CPU. Waits for the device. As `torch.get_rng_state()` and `torch.cuda.get_rng_state()`.
///
/// # Errors
///
/// [`Error::DeviceUnavailable`](crate::Error::DeviceUnavailable).
#[doc(alias = "get_rng_state")]
pub fn rng_state(device: Device) -> Result<Tensor> {
    check_usable(device)?;
    ffi::rng_state(device)
}

/// Makes a device's default random number generator go on from a state. As `torch.set_rng_state()` and
/// `torch.cuda.set_rng_state()`.
///
/// # Errors
///
/// [`Error::DeviceUnavailable`](crate::Error::DeviceUnavailable), and [`Error::Torch`](crate::Error::Torch) if `state`
/// is not a state of that device's generator.
pub fn set_rng_state(device: Device, state: &Tensor) -> Result<()> {
    check_usable(device)?;
    ffi::rng_set_state(device, state)
}

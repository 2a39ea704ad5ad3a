//! The bytes of tensors, and the states of random number generators.

use tch::{Device, Tensor};

use super::{call, given, place, pointer};
use crate::error::Result;
use crate::sys;

/// Copies the bytes of a contiguous tensor's elements, from the element `first` on. Synchronizes.
pub(crate) fn elements_read(from: &Tensor, first: i64, to: &mut [u8]) -> Result<()> {
    let (memory, len) = (to.as_mut_ptr(), to.len());
    // SAFETY: `from` is a live tensor, `to` is valid for `len` writes, and the shim stays within both.
    call(|err| unsafe { sys::tamp_elements_read(from.as_ptr(), first, memory, len, err) })
}

/// Overwrites a contiguous tensor's elements, from the element `first` on. Synchronizes.
pub(crate) fn elements_write(to: &mut Tensor, first: i64, from: &[u8]) -> Result<()> {
    let (memory, len) = (from.as_ptr(), from.len());
    // SAFETY: `to` is a live tensor, `from` is valid for `len` reads, and the shim stays within both and keeps neither.
    call(|err| unsafe { sys::tamp_elements_write(pointer(to), first, memory, len, err) })
}

/// Returns the state of a device's default random number generator, which libtorch keeps on the host.
pub(crate) fn rng_state(device: Device) -> Result<Tensor> {
    let (device_type, index) = place(device)?;
    // SAFETY: takes two numbers, and `err` is valid for a write.
    given(call(|err| unsafe { sys::tamp_rng_state(device_type, index, err) })?)
}

/// Sets the state of a device's default random number generator.
pub(crate) fn rng_set_state(device: Device, state: &Tensor) -> Result<()> {
    let (device_type, index) = place(device)?;
    // SAFETY: `state` is a live tensor, and `err` is valid for a write.
    call(|err| unsafe { sys::tamp_rng_set_state(device_type, index, state.as_ptr(), err) })
}

/// Returns an error unless a device's default random number generator accepts a state. The generator stays as it is.
pub(crate) fn rng_check_state(device: Device, state: &Tensor) -> Result<()> {
    let (device_type, index) = place(device)?;
    // SAFETY: `state` is a live tensor, and `err` is valid for a write.
    call(|err| unsafe { sys::tamp_rng_check_state(device_type, index, state.as_ptr(), err) })
}

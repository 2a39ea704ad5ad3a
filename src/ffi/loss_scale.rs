//! Scaled losses, and the check of gradients for functional loss scales.

use tch::Tensor;

use super::{call, given, pointers};
use crate::error::Result;
use crate::sys;

/// Multiplies a tensor by a factor of one element on any device. The product of half-precision numbers is f32.
pub(crate) fn scaled(tensor: &Tensor, factor: &Tensor) -> Result<Tensor> {
    let (tensor, factor) = (tensor.as_ptr(), factor.as_ptr());
    // SAFETY: both are live tensors, and `err` is valid for a write.
    given(call(|err| unsafe { sys::tamp_scaled(tensor, factor, err) })?)
}

/// Returns whether all elements of floating or complex tensors are finite, as a bool tensor on the device of the first
/// one.
pub(crate) fn all_finite(tensors: &[&Tensor]) -> Result<Tensor> {
    let tensors = pointers(tensors.iter().copied());
    // SAFETY: the array has `tensors.len()` elements, and the borrows keep the tensors alive.
    given(call(|err| unsafe { sys::tamp_all_finite(tensors.as_ptr(), tensors.len(), err) })?)
}

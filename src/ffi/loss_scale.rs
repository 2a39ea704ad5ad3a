//! The check of gradients for functional loss scales.

use tch::Tensor;

use super::{call, given, pointers};
use crate::error::Result;
use crate::sys;

/// Returns whether all elements of floating or complex tensors are finite, as a bool tensor on the device of the first
/// one.
pub(crate) fn all_finite(tensors: &[&Tensor]) -> Result<Tensor> {
    let tensors = pointers(tensors.iter().copied());
    // SAFETY: the array has `tensors.len()` elements, and the borrows keep the tensors alive.
    given(call(|err| unsafe { sys::tamp_all_finite(tensors.as_ptr(), tensors.len(), err) })?)
}

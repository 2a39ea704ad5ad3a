//! What functional loss scales ask of gradients.

use tch::Tensor;

use super::{call, given, pointers};
use crate::error::Result;
use crate::sys;

/// Whether all elements of floating or complex tensors are finite: a bool on the device of the first.
pub(crate) fn all_finite(tensors: &[&Tensor]) -> Result<Tensor> {
    let tensors = pointers(tensors.iter().copied());
    // SAFETY: the array has `tensors.len()` elements, and the borrows keep the tensors alive.
    given(call(|err| unsafe { sys::tamp_all_finite(tensors.as_ptr(), tensors.len(), err) })?)
}

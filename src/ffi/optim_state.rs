//! Allocation of the state of an optimizer.

use std::ptr;

use tch::{Kind, Tensor};

use super::codes::dtype_code;
use super::{call, given, pointers};
use crate::error::{Error, Result};
use crate::sys;

/// The number of `c10::ScalarType` for i16.
const SHORT: i8 = 2;

/// Creates a tensor like each of the parameters, with the given dtype if any, filled with a value.
pub(crate) fn optim_states_new(
    parameters: &[&Tensor],
    kind: Option<Kind>,
    value: f64,
) -> Result<Vec<Tensor>> {
    let dtype = match kind {
        None => -1,
        Some(Kind::Int16) => SHORT,
        Some(kind) => {
            dtype_code(kind).ok_or_else(|| Error::Torch(format!("no state is {kind:?}")))?
        }
    };
    let tensors = pointers(parameters.iter().copied());
    let mut states = vec![ptr::null_mut(); tensors.len()];
    let (array, count, out) = (tensors.as_ptr(), tensors.len(), states.as_mut_ptr());
    // SAFETY: both arrays have `count` elements, and `parameters` keeps the tensors alive.
    call(|err| unsafe { sys::tamp_optim_states_new(array, count, dtype, value, out, err) })?;
    states.into_iter().map(given).collect()
}

/// Creates an f32 copy of each of the parameters.
pub(crate) fn masters_new(parameters: &[&Tensor]) -> Result<Vec<Tensor>> {
    let tensors = pointers(parameters.iter().copied());
    let mut masters = vec![ptr::null_mut(); tensors.len()];
    let (array, count, out) = (tensors.as_ptr(), tensors.len(), masters.as_mut_ptr());
    // SAFETY: both arrays have `count` elements, and `parameters` keeps the tensors alive.
    call(|err| unsafe { sys::tamp_masters_new(array, count, out, err) })?;
    masters.into_iter().map(given).collect()
}

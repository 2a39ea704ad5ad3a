//! Allocation of the state of an optimizer.

use std::ptr;

use tch::{Kind, Tensor};

use super::codes::dtype_code;
use super::{call, given, pointer, pointers};
use crate::error::{Error, Result};
use crate::sys;

/// The shape of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StateShape {
    /// That of its parameter, with its strides.
    Like,
    /// That of its parameter, contiguous.
    Contiguous,
    /// One element for each 32.
    OfBlocks,
}

impl StateShape {
    fn code(self) -> u8 {
        match self {
            Self::Like => sys::STATE_LIKE,
            Self::Contiguous => sys::STATE_CONTIGUOUS,
            Self::OfBlocks => sys::STATE_OF_BLOCKS,
        }
    }
}

/// The numbers of `c10::ScalarType` for states that are no floating-point numbers.
const INTEGERS: [(Kind, i8); 3] = [(Kind::Uint8, 0), (Kind::Int8, 1), (Kind::Int16, 2)];

/// Creates a state for each of the parameters, with the given dtype or else the parameter's, filled with a value.
pub(crate) fn optim_states_new(
    parameters: &[&Tensor],
    kind: Option<Kind>,
    shape: StateShape,
    value: f64,
) -> Result<Vec<Tensor>> {
    let integer = |kind| INTEGERS.iter().find(|(known, _)| *known == kind).map(|(_, code)| *code);
    let dtype = match kind {
        None => -1,
        Some(kind) => integer(kind)
            .or_else(|| dtype_code(kind))
            .ok_or_else(|| Error::Torch(format!("no state is {kind:?}")))?,
    };
    let shape = shape.code();
    let tensors = pointers(parameters.iter().copied());
    let mut states = vec![ptr::null_mut(); tensors.len()];
    let (array, count, out) = (tensors.as_ptr(), tensors.len(), states.as_mut_ptr());
    // SAFETY: both arrays have `count` elements, and `parameters` keeps the tensors alive.
    call(|err| unsafe { sys::tamp_optim_states_new(array, count, dtype, shape, value, out, err) })?;
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

/// Returns the f32 moments, exp_avg and exp_avg_sq, of codes in 8 bits: exp_avg, exp_avg_sq and exponents.
pub(crate) fn codes_decode([exp_avg, exp_avg_sq, exponents]: [&Tensor; 3]) -> Result<[Tensor; 2]> {
    let [exp_avg, exp_avg_sq, exponents] = [exp_avg, exp_avg_sq, exponents].map(pointer);
    let mut numbers = [ptr::null_mut(); 2];
    let out = numbers.as_mut_ptr();
    // SAFETY: all are live tensors, and `out` has room for the two that are returned.
    call(|err| unsafe { sys::tamp_codes_decode(exp_avg, exp_avg_sq, exponents, out, err) })?;
    let [exp_avg, exp_avg_sq] = numbers.map(given);
    Ok([exp_avg?, exp_avg_sq?])
}

/// Overwrites codes by those of f32 moments.
pub(crate) fn codes_encode(
    [exp_avg, exp_avg_sq]: [&Tensor; 2],
    (beta1, beta2): (f64, f64),
    codes: [&Tensor; 3],
) -> Result<()> {
    let (exp_avg, exp_avg_sq, codes) = (pointer(exp_avg), pointer(exp_avg_sq), codes.map(pointer));
    let out = codes.as_ptr();
    // SAFETY: all are live tensors, of which the codes are changed in place through libtorch's own handles, which alias
    // freely.
    call(|err| unsafe { sys::tamp_codes_encode(exp_avg, exp_avg_sq, beta1, beta2, out, err) })
}

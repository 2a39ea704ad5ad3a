//! Clipping, the fused optimizers, and answers on their way from a device.

use std::ptr;

use tch::{Kind, Tensor};

use super::{call, given, pointer, pointers};
use crate::device::dtype_code;
use crate::error::{Error, Result};
use crate::sys;

/// Clips the gradients of the parameters to a common norm and returns the norm before; `None` without gradients. Only
/// with `error_if_nonfinite` the host waits, and fails for an infinite or NaN norm before anything is clipped.
pub(crate) fn clip_grad_norm(
    parameters: &[Tensor],
    max_norm: f64,
    error_if_nonfinite: bool,
) -> Result<Option<Tensor>> {
    let tensors = pointers(parameters);
    let (array, count) = (tensors.as_ptr(), tensors.len());
    let mut finite = 1;
    // SAFETY: the array has `count` elements, `parameters` keeps the tensors alive, and `finite` is valid for a write.
    let norm = call(|err| unsafe {
        let check = error_if_nonfinite.into();
        sys::tamp_clip_grad_norm(array, count, max_norm, check, &mut finite, err)
    })?;
    if norm.is_null() {
        return Ok(None);
    }
    let norm = given(norm)?;
    match finite {
        0 => Err(Error::NonFiniteNorm { norm: norm.f_double_value(&[])? }),
        _ => Ok(Some(norm)),
    }
}

/// The factor by which gradients of a norm are to be multiplied, on its device.
pub(crate) fn clip_factor(norm: &Tensor, max_norm: f64) -> Result<Tensor> {
    // SAFETY: `norm` is a live tensor, and `err` is valid for a write.
    given(call(|err| unsafe { sys::tamp_clip_factor(norm.as_ptr(), max_norm, err) })?)
}

/// Clamps every element of the gradients of the parameters to `-max..=max`.
pub(crate) fn clip_grad_value(parameters: &[Tensor], max: f64) -> Result<()> {
    let tensors = pointers(parameters);
    // SAFETY: the array has `tensors.len()` elements, and `parameters` keeps the tensors alive.
    call(|err| unsafe { sys::tamp_clip_grad_value(tensors.as_ptr(), tensors.len(), max, err) })
}

/// Drops the gradients of the parameters.
pub(crate) fn gradients_drop(parameters: &[Tensor]) -> Result<()> {
    let tensors = pointers(parameters);
    // SAFETY: the array has `tensors.len()` elements, and `parameters` keeps the tensors alive.
    call(|err| unsafe { sys::tamp_gradients_drop(tensors.as_ptr(), tensors.len(), err) })
}

/// A parameter that has a gradient, and its state.
#[derive(Debug)]
pub(crate) struct OptimParameter<'a> {
    pub(crate) parameter: &'a Tensor,
    pub(crate) step: Option<&'a Tensor>,
    /// exp_avg, momentum_buffer or sum; exp_avg_sq; max_exp_avg_sq.
    pub(crate) states: [Option<&'a Tensor>; 3],
    pub(crate) master: Option<&'a Tensor>,
    /// One of `sys::MASTER_*`.
    pub(crate) masters: u8,
    pub(crate) seed: u64,
    /// The index of its options.
    pub(crate) options: usize,
    pub(crate) first_step: bool,
}

/// Steps all parameters, or changes nothing where `found_inf` is not zero.
pub(crate) fn optim_step(
    parameters: &[OptimParameter<'_>],
    options: &[sys::OptimOptions],
    grad_scale: Option<&Tensor>,
    clip: Option<&Tensor>,
    found_inf: Option<&Tensor>,
) -> Result<()> {
    let optional = |tensor: Option<&Tensor>| tensor.map_or(ptr::null_mut(), pointer);
    let raw: Vec<_> = parameters
        .iter()
        .map(|given| sys::OptimParameter {
            parameter: pointer(given.parameter),
            step: optional(given.step),
            first: optional(given.states[0]),
            second: optional(given.states[1]),
            third: optional(given.states[2]),
            master: optional(given.master),
            seed: given.seed,
            options: u32::try_from(given.options).unwrap_or(u32::MAX),
            masters: given.masters,
            first_step: given.first_step.into(),
        })
        .collect();
    assert!(parameters.iter().all(|given| given.options < options.len()), "an index of options");
    let scale = sys::OptimScale {
        grad_scale: optional(grad_scale),
        clip: optional(clip),
        found_inf: optional(found_inf),
    };
    let (array, count) = (raw.as_ptr(), raw.len());
    // SAFETY: the array has `count` elements, each of which names options that exist; the borrows keep every tensor
    // alive, and tensors are changed in place only through libtorch's own handles, which alias freely.
    call(|err| unsafe { sys::tamp_optim_step(array, count, options.as_ptr(), &scale, err) })
}

/// The number of `c10::ScalarType` for i16.
const SHORT: i8 = 2;

/// Has the gradients of half parameters be f32: those there are converted.
pub(crate) fn gradients_widen(parameters: &[Tensor]) -> Result<()> {
    let tensors = pointers(parameters);
    // SAFETY: the array has `tensors.len()` elements, and `parameters` keeps the tensors alive.
    call(|err| unsafe { sys::tamp_gradients_widen(tensors.as_ptr(), tensors.len(), err) })
}

/// The f32 numbers of a bf16 parameter and its remainder.
pub(crate) fn master_join(parameter: &Tensor, remainder: &Tensor) -> Result<Tensor> {
    // SAFETY: both are live tensors, and `err` is valid for a write.
    given(call(|err| unsafe {
        sys::tamp_master_join(parameter.as_ptr(), remainder.as_ptr(), err)
    })?)
}

/// The remainders of f32 numbers that round to a bf16 parameter, and zero for those that do not.
pub(crate) fn master_remainder_of(master: &Tensor, parameter: &Tensor) -> Result<Tensor> {
    let (master, parameter) = (master.as_ptr(), parameter.as_ptr());
    // SAFETY: both are live tensors, and `err` is valid for a write.
    given(call(|err| unsafe { sys::tamp_master_remainder_of(master, parameter, err) })?)
}

/// Brings masters into line with parameters that somebody else has written to: all of them or, on failure, none.
pub(crate) fn masters_renew(parameters: &[&Tensor], masters: &[&Tensor]) -> Result<()> {
    assert_eq!(parameters.len(), masters.len(), "one master for each parameter");
    let (tensors, kept) = (pointers(parameters.iter().copied()), pointers(masters.iter().copied()));
    let count = tensors.len();
    // SAFETY: both arrays have `count` elements, and the borrows keep the tensors alive; the masters are changed in
    // place through libtorch's own handles, which alias freely.
    call(|err| unsafe { sys::tamp_masters_renew(tensors.as_ptr(), kept.as_ptr(), count, err) })
}

/// Makes a tensor like each of the parameters, of another dtype if one is given, filled with a value.
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

/// Makes an f32 copy of each of the parameters.
pub(crate) fn masters_new(parameters: &[&Tensor]) -> Result<Vec<Tensor>> {
    let tensors = pointers(parameters.iter().copied());
    let mut masters = vec![ptr::null_mut(); tensors.len()];
    let (array, count, out) = (tensors.as_ptr(), tensors.len(), masters.as_mut_ptr());
    // SAFETY: both arrays have `count` elements, and `parameters` keeps the tensors alive.
    call(|err| unsafe { sys::tamp_masters_new(array, count, out, err) })?;
    masters.into_iter().map(given).collect()
}

/// A number on its way from a device to the host.
#[derive(Debug)]
pub(crate) struct Arrival(*mut sys::Arrival);

// SAFETY: it owns a tensor and an event of libtorch, which belong to no thread.
unsafe impl Send for Arrival {}

impl Arrival {
    /// Sends an f32 tensor of one element to the host without waiting for it.
    pub(crate) fn new(flag: &Tensor) -> Result<Self> {
        // SAFETY: `flag` is a live tensor, and `err` is valid for a write.
        call(|err| unsafe { sys::tamp_arrival_new(flag.as_ptr(), err) }).map(Self)
    }

    /// Whether the number is not zero, once it is there. Never waits.
    pub(crate) fn poll(&self) -> Result<Option<bool>> {
        // SAFETY: the pointer came from `tamp_arrival_new`, which succeeded, and is freed in `drop` only.
        match call(|err| unsafe { sys::tamp_arrival_poll(self.0, err) })? {
            sys::PENDING => Ok(None),
            sys::ZERO => Ok(Some(false)),
            sys::NONZERO => Ok(Some(true)),
            other => Err(Error::Torch(format!("the arrival of a number answered {other}"))),
        }
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        // SAFETY: the pointer came from `tamp_arrival_new`, and nobody uses it any more.
        unsafe { sys::tamp_arrival_free(self.0) }
    }
}

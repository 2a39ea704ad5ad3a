//! One safe function for each function of the shim. With `sys.rs`, the only home of `unsafe` in this crate.

mod callbacks;
mod checkpoint;
mod function;
mod optim;
#[cfg(test)]
mod tests;

use std::ffi::{CStr, c_char};
use std::ptr;

use tch::Tensor;

use crate::error::{Error, Result};
use crate::sys;

pub(crate) use callbacks::{Borrowed, Node, Recorded};
pub(crate) use checkpoint::*;
pub(crate) use function::{FunctionCall, function_begin, function_record};

pub(crate) use optim::*;

/// Calls a function of the shim with `err` as its last argument and turns a message into an error.
fn call<T>(function: impl FnOnce(*mut *mut c_char) -> T) -> Result<T> {
    let mut err = ptr::null_mut();
    let out = function(&mut err);
    if err.is_null() {
        return Ok(out);
    }
    // SAFETY: the shim writes nothing but NUL-terminated strings to `err`, and `err` is not null.
    let message = unsafe { CStr::from_ptr(err) }.to_string_lossy().into_owned();
    // SAFETY: the string came from malloc, and nobody uses it any more.
    unsafe { sys::tamp_string_free(err) };
    Err(Error::Torch(message))
}

/// The pointer that the shim borrows for the length of one call.
fn pointer(tensor: &Tensor) -> *mut sys::Tensor {
    tensor.as_ptr().cast_mut()
}

fn pointers<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> Vec<*mut sys::Tensor> {
    tensors.into_iter().map(pointer).collect()
}

/// Whether libtorch_cuda is linked into this program.
pub(crate) fn cuda_is_linked() -> bool {
    // SAFETY: takes nothing and reads a constant.
    unsafe { sys::tamp_cuda_is_linked() != 0 }
}

/// Initialises CUDA, or says in libtorch's words why it cannot.
pub(crate) fn cuda_initialize() -> Result<()> {
    // SAFETY: `err` is valid for a write.
    call(|err| unsafe { sys::tamp_cuda_initialize(err) })
}

/// Reads the autocast state of the device types that `state` names.
pub(crate) fn autocast_read(state: &mut sys::AutocastState) -> Result<()> {
    assert!(usize::from(state.count) <= sys::AUTOCAST_DEVICES);
    // SAFETY: `state` is a whole struct of the shim's layout, and `count` stays within its array.
    call(|err| unsafe { sys::tamp_autocast_read(state, err) })
}

/// Opens a region: the state is `next`.
pub(crate) fn autocast_enter(next: &sys::AutocastState, outermost: bool) -> Result<()> {
    assert!(usize::from(next.count) <= sys::AUTOCAST_DEVICES);
    // SAFETY: `next` has the shim's layout and outlives the call, and `count` stays within its array.
    call(|err| unsafe { sys::tamp_autocast_enter(next, outermost.into(), err) })
}

/// Closes a region: the state is `previous` again.
pub(crate) fn autocast_exit(previous: &sys::AutocastState, outermost: bool) {
    // SAFETY: `previous` is a whole struct that `autocast_read` filled.
    unsafe { sys::tamp_autocast_exit(previous, outermost.into()) }
}

/// Forgets every cached cast of a weight.
pub(crate) fn autocast_clear_cache() -> Result<()> {
    // SAFETY: `err` is valid for a write.
    call(|err| unsafe { sys::tamp_autocast_clear_cache(err) })
}

/// Describes the gradients of the parameters, in their order.
pub(crate) fn gradients_inspect(parameters: &[Tensor]) -> Result<Vec<sys::Gradient>> {
    let tensors = pointers(parameters);
    let mut gradients = vec![sys::Gradient::default(); tensors.len()];
    let out = gradients.as_mut_ptr();
    // SAFETY: both arrays have `tensors.len()` elements, and `parameters` keeps the tensors alive.
    call(|err| unsafe { sys::tamp_gradients_inspect(tensors.as_ptr(), tensors.len(), out, err) })?;
    Ok(gradients)
}

/// What tells tensors apart: the same number for every handle of one tensor, as long as one of them lives.
pub(crate) fn identities(tensors: &[Tensor]) -> Result<Vec<usize>> {
    let known = gradients_inspect(tensors)?;
    Ok(known.iter().map(|gradient| gradient.parameter).collect())
}

/// Drops the gradient of a parameter.
pub(crate) fn gradient_drop(parameter: &Tensor) -> Result<()> {
    // SAFETY: `parameter` is a live tensor; the shim changes only its gradient slot.
    call(|err| unsafe { sys::tamp_gradient_drop(pointer(parameter), err) })
}

/// Unscales the gradients of `parameters`, all of `found_inf`'s device, and tells whether one was infinite or NaN;
/// `None` where the answer lies on the device.
pub(crate) fn gradients_unscale(
    parameters: &[&Tensor],
    scale: &Tensor,
    found_inf: &Tensor,
    options: u8,
) -> Result<Option<bool>> {
    let tensors = pointers(parameters.iter().copied());
    let (array, count) = (tensors.as_ptr(), tensors.len());
    let (scale, found_inf) = (scale.as_ptr(), pointer(found_inf));
    // SAFETY: the array has `count` elements, the borrows keep every tensor alive, and tensors are changed in place
    // only through libtorch's own handles, which alias freely.
    let answer = call(|err| unsafe {
        sys::tamp_gradients_unscale(array, count, scale, found_inf, options, err)
    })?;
    known(answer)
}

/// An answer of the shim, where the host has it.
fn known(answer: u8) -> Result<Option<bool>> {
    match answer {
        sys::FINITE => Ok(Some(false)),
        sys::NON_FINITE => Ok(Some(true)),
        sys::ON_DEVICE => Ok(None),
        other => Err(Error::Torch(format!("the check of gradients answered {other}"))),
    }
}

/// The norm of the gradients of `parameters`, all of `found_inf`'s device, divided by `scale`, and whether it is
/// infinite or NaN; `None` where the answer lies on the device. The gradients stay as they are.
pub(crate) fn gradients_norm(
    parameters: &[&Tensor],
    scale: &Tensor,
    found_inf: &Tensor,
) -> Result<(Tensor, Option<bool>)> {
    let tensors = pointers(parameters.iter().copied());
    let (array, count) = (tensors.as_ptr(), tensors.len());
    let (scale, found_inf) = (scale.as_ptr(), pointer(found_inf));
    let mut answer = 0;
    // SAFETY: the array has `count` elements, the borrows keep every tensor alive, and `answer` is valid for a write.
    let norm = call(|err| unsafe {
        sys::tamp_gradients_norm(array, count, scale, found_inf, &mut answer, err)
    })?;
    Ok((given(norm)?, known(answer)?))
}

/// A tensor that the shim returned.
fn given(tensor: *mut sys::Tensor) -> Result<Tensor> {
    if tensor.is_null() {
        return Err(Error::Torch("the shim returned no tensor".to_owned()));
    }
    // SAFETY: a pointer of the shim's that is not null is a new tensor, which it gave to us alone.
    Ok(unsafe { Tensor::from_ptr(tensor) })
}

/// Whether any of the one-element tensors is not zero. Waits for their devices, once.
pub(crate) fn any_nonzero(tensors: &[&Tensor]) -> Result<bool> {
    let tensors = pointers(tensors.iter().copied());
    // SAFETY: the array has `tensors.len()` elements, and the borrows keep the tensors alive.
    call(|err| unsafe { sys::tamp_any_nonzero(tensors.as_ptr(), tensors.len(), err) })
        .map(|any| any != 0)
}

/// Whether all elements of floating or complex tensors are finite: a bool on the device of the first.
pub(crate) fn all_finite(tensors: &[&Tensor]) -> Result<Tensor> {
    let tensors = pointers(tensors.iter().copied());
    // SAFETY: the array has `tensors.len()` elements, and the borrows keep the tensors alive.
    given(call(|err| unsafe { sys::tamp_all_finite(tensors.as_ptr(), tensors.len(), err) })?)
}

/// Grows or backs off `scale` and counts in `tracker`, in place.
pub(crate) fn scale_update(
    scale: &Tensor,
    tracker: &Tensor,
    found_infs: &[&Tensor],
    rule: &sys::ScaleRule,
) -> Result<()> {
    let tensors = pointers(found_infs.iter().copied());
    let (array, count) = (tensors.as_ptr(), tensors.len());
    let (scale, tracker) = (pointer(scale), pointer(tracker));
    // SAFETY: the array has `count` elements, the borrows keep every tensor alive, and `rule` has the shim's layout.
    call(|err| unsafe { sys::tamp_scale_update(scale, tracker, array, count, rule, err) })
}

/// Makes the `call`-th function of the shim from now on fail; see `csrc/testing.cpp`.
#[cfg(all(test, tamp_testing))]
pub(crate) fn testing_fail_at(call: i64, kind: u8) -> i64 {
    // SAFETY: sets two numbers of the calling thread.
    unsafe { sys::tamp_testing_fail_at(call, kind) }
}

/// Enters or leaves inference mode.
#[cfg(all(test, tamp_testing))]
pub(crate) fn testing_inference_mode(enabled: bool) {
    // SAFETY: holds or drops a guard of the calling thread.
    unsafe { sys::tamp_testing_inference_mode(enabled.into()) }
}

/// Has the optimizers of this thread treat the CPU as they do other devices.
#[cfg(all(test, tamp_testing))]
pub(crate) fn testing_as_other_device(enabled: bool) {
    // SAFETY: it only sets a flag of the calling thread.
    unsafe { sys::tamp_testing_as_other_device(enabled.into()) }
}

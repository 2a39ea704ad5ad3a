//! One safe function for each function of the shim. With `sys.rs`, the only home of `unsafe` in this crate.

mod callbacks;
mod checkpoint;
mod function;
mod memory;
mod numbers;
mod optim;
mod scaler;
#[cfg(test)]
mod tests;

use std::ffi::{CStr, c_char};
use std::ptr;

use tch::{Device, Tensor};

use crate::device::device_type;
use crate::error::{Error, Result};
use crate::sys;

pub(crate) use callbacks::{Borrowed, Node, Recorded, Values};
pub(crate) use checkpoint::*;
pub(crate) use function::{FunctionCall, function_begin, function_record};
pub(crate) use memory::{HeldGradients, Stamps, sizes};
pub(crate) use numbers::*;
pub(crate) use optim::*;
pub(crate) use scaler::*;

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

/// A device as the shim counts: its type and its index.
fn place(device: Device) -> Result<(i8, i8)> {
    let index = match device {
        Device::Cuda(index) => i8::try_from(index)
            .map_err(|_| Error::Torch(format!("{device:?} has too large an index")))?,
        _ => -1,
    };
    Ok((device_type(device)?, index))
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

/// The number of the backward that runs on this thread, the innermost of several; -1 where none does.
pub(crate) fn autocast_backward() -> i64 {
    // SAFETY: takes nothing and reads a number of the calling thread.
    unsafe { sys::tamp_autocast_backward() }
}

/// Has `settle` called on this thread when the backward that runs here has ended and libtorch has restored the thread's
/// state. It must not unwind.
pub(crate) fn autocast_after_backward(settle: extern "C" fn()) {
    // SAFETY: `settle` is a safe function without parameters, which may be called at any time.
    unsafe { sys::tamp_autocast_after_backward(settle) }
}

/// A tensor that the shim returned.
fn given(tensor: *mut sys::Tensor) -> Result<Tensor> {
    if tensor.is_null() {
        return Err(Error::Torch("the shim returned no tensor".to_owned()));
    }
    // SAFETY: a pointer of the shim's that is not null is a new tensor, which it gave to us alone.
    Ok(unsafe { Tensor::from_ptr(tensor) })
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

/// Does what a sanitizer has to find.
#[cfg(all(test, tamp_testing))]
pub(crate) fn testing_fault(kind: u8) {
    // SAFETY: there is none; a build without a sanitizer must not call it.
    unsafe { sys::tamp_testing_fault(kind) }
}

/// Has the optimizers of this thread treat the CPU as they do other devices.
#[cfg(all(test, tamp_testing))]
pub(crate) fn testing_as_other_device(enabled: bool) {
    // SAFETY: it only sets a flag of the calling thread.
    unsafe { sys::tamp_testing_as_other_device(enabled.into()) }
}

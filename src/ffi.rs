//! One safe function for each function of the shim. `unsafe` is allowed only here and in `sys.rs`.

mod autocast;
mod average;
mod callbacks;
mod checkpoint;
mod clip;
mod codes;
mod device;
#[cfg(feature = "distributed")]
pub(crate) mod distributed;
#[cfg(feature = "insight")]
pub(crate) mod emulation;
#[cfg(feature = "insight")]
pub(crate) mod exponents;
mod function;
mod gradients;
mod graph;
mod heap;
#[cfg(feature = "insight")]
pub(crate) mod insight;
#[cfg(feature = "jit")]
mod jit;
mod loss_scale;
mod memory;
mod numbers;
mod optim;
mod optim_state;
#[cfg(feature = "distributed")]
pub(crate) mod processes;
#[cfg(feature = "distributed")]
pub(crate) mod random;
mod scale;
mod spikes;
#[cfg(all(test, tamp_testing))]
mod testing;
#[cfg(test)]
mod tests;
mod unscale;

use std::ffi::{CStr, c_char};
use std::ptr;

use tch::{Device, Tensor};

use crate::error::{Error, Result};
use crate::sys;

pub(crate) use autocast::*;
pub(crate) use average::*;
pub(crate) use callbacks::{Borrowed, Node, Recorded, SavedValues};
pub(crate) use checkpoint::*;
pub(crate) use clip::*;
pub(crate) use codes::{device_type, dtype_code};
pub(crate) use device::*;
pub(crate) use function::*;
pub(crate) use gradients::*;
pub(crate) use graph::{Graph, graph_write};
pub(crate) use heap::*;
#[cfg(feature = "jit")]
pub(crate) use jit::*;
pub(crate) use loss_scale::*;
pub(crate) use memory::{Stamps, Watched, elements, is_dense, numel, overlapping, sizes};
pub(crate) use numbers::*;
pub(crate) use optim::*;
pub(crate) use optim_state::*;
pub(crate) use scale::*;
pub(crate) use spikes::*;
#[cfg(all(test, tamp_testing))]
pub(crate) use testing::*;
pub(crate) use unscale::*;

/// Calls a function of the shim with `err` as its last argument, and returns a message in it as an error.
fn call<T>(function: impl FnOnce(*mut *mut c_char) -> T) -> Result<T> {
    let mut err = ptr::null_mut();
    let out = function(&mut err);
    if err.is_null() {
        return Ok(out);
    }
    // SAFETY: the shim writes nothing but NUL-terminated strings to `err`, and `err` is not null.
    let message = unsafe { CStr::from_ptr(err) }.to_string_lossy().into_owned();
    // SAFETY: the string came from malloc, and is not used any more.
    unsafe { sys::tamp_string_free(err) };
    Err(Error::Torch(message))
}

/// Returns the type and the index of a device as the shim expects them.
fn place(device: Device) -> Result<(i8, i8)> {
    let index = match device {
        Device::Cuda(index) => i8::try_from(index)
            .map_err(|_| Error::Torch(format!("{device:?} has too large an index")))?,
        _ => -1,
    };
    Ok((device_type(device)?, index))
}

/// Returns the pointer that the shim borrows for the duration of a call.
fn pointer(tensor: &Tensor) -> *mut sys::Tensor {
    tensor.as_ptr().cast_mut()
}

fn pointers<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> Vec<*mut sys::Tensor> {
    tensors.into_iter().map(pointer).collect()
}

/// Takes ownership of a tensor that the shim returned.
fn given(tensor: *mut sys::Tensor) -> Result<Tensor> {
    if tensor.is_null() {
        return Err(Error::Torch("the shim returned no tensor".to_owned()));
    }
    // SAFETY: a non-null pointer from the shim is a new tensor that is owned by the caller alone.
    Ok(unsafe { Tensor::from_ptr(tensor) })
}

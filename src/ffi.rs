//! One safe function for each function of the shim. `unsafe` is allowed only here and in `sys.rs`.

mod autocast;
mod average;
mod callbacks;
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
#[cfg(feature = "insight")]
pub(crate) mod insight;
#[cfg(feature = "jit")]
mod jit;
mod lean;
mod memory;
mod numbers;
mod optim;
#[cfg(feature = "distributed")]
pub(crate) mod processes;
mod saved_tensors;
mod scale;
#[cfg(all(test, tamp_testing))]
mod testing;
#[cfg(test)]
mod tests;

use std::ffi::{CStr, c_char};
use std::ptr;

use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};
use crate::sys;

pub(crate) use autocast::*;
pub(crate) use average::*;
pub(crate) use callbacks::{Borrowed, Node, Recorded, SavedValues};
pub(crate) use device::*;
pub(crate) use function::*;
pub(crate) use gradients::*;
pub(crate) use graph::{Graph, graph_write};
#[cfg(feature = "jit")]
pub(crate) use jit::*;
pub(crate) use lean::*;
pub(crate) use memory::*;
pub(crate) use numbers::*;
pub(crate) use optim::*;
pub(crate) use saved_tensors::*;
pub(crate) use scale::*;
#[cfg(all(test, tamp_testing))]
pub(crate) use testing::*;

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

/// Returns the number of `c10::DeviceType` for a device that has autocast, and an error for others.
pub(crate) fn device_type(device: Device) -> Result<i8> {
    match device {
        Device::Cpu => Ok(0),
        Device::Cuda(_) => Ok(1),
        Device::Mps => Ok(13),
        Device::Vulkan => {
            let reason = "libtorch has no autocast for Vulkan; use the CPU or CUDA".to_owned();
            Err(Error::DeviceUnavailable { device, reason })
        }
    }
}

/// Returns the number of `c10::ScalarType` for a floating dtype.
pub(crate) fn dtype_code(kind: Kind) -> Option<i8> {
    match kind {
        Kind::Half => Some(5),
        Kind::Float => Some(6),
        Kind::Double => Some(7),
        Kind::BFloat16 => Some(15),
        _ => None,
    }
}

/// Returns the floating dtype for a number of `c10::ScalarType`.
fn dtype_kind(code: i8) -> Result<Kind> {
    kind_of(code).ok_or_else(|| Error::Torch(format!("autocast has the unknown dtype {code}")))
}

/// Returns the floating dtype for a number of `c10::ScalarType`, or `None` for others.
fn kind_of(code: i8) -> Option<Kind> {
    [Kind::Half, Kind::Float, Kind::Double, Kind::BFloat16]
        .into_iter()
        .find(|kind| dtype_code(*kind) == Some(code))
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

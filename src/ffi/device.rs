//! Availability of CUDA, and asynchronous copies of numbers to the host.

use tch::Tensor;

use super::call;
use crate::error::{Error, Result};
use crate::sys;

/// Whether libtorch_cuda is linked into this program.
pub(crate) fn cuda_is_linked() -> bool {
    // SAFETY: takes nothing and reads a constant.
    unsafe { sys::tamp_cuda_is_linked() != 0 }
}

/// Initializes CUDA. The error has libtorch's message.
pub(crate) fn cuda_initialize() -> Result<()> {
    // SAFETY: `err` is valid for a write.
    call(|err| unsafe { sys::tamp_cuda_initialize(err) })
}

/// Sets whether f32 matrix products on CUDA devices may use TensorFloat-32. Returns whether they could before.
pub(crate) fn allow_tf32(allow: bool) -> Result<bool> {
    // SAFETY: `err` is valid for a write.
    call(|err| unsafe { sys::tamp_allow_tf32(allow.into(), err) }).map(|before| before != 0)
}

/// An asynchronous copy of a number from a device to the host.
#[derive(Debug)]
pub(crate) struct Arrival(*mut sys::Arrival);

// SAFETY: it owns a tensor and an event of libtorch, which are not bound to a thread.
unsafe impl Send for Arrival {}

impl Arrival {
    /// Starts to copy an f32 tensor of one element to the host. Does not synchronize.
    pub(crate) fn new(flag: &Tensor) -> Result<Self> {
        // SAFETY: `flag` is a live tensor, and `err` is valid for a write.
        call(|err| unsafe { sys::tamp_arrival_new(flag.as_ptr(), err) }).map(Self)
    }

    /// Returns whether the number is not zero, or `None` if it has not arrived yet. Never synchronizes.
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
        // SAFETY: the pointer came from `tamp_arrival_new`, and is not used any more.
        unsafe { sys::tamp_arrival_free(self.0) }
    }
}

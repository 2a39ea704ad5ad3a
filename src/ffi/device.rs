//! Availability of CUDA, and asynchronous copies of numbers to the host.

use tch::Tensor;

use super::call;
use crate::error::Result;
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

/// The precision of f32 matrix products, in all threads, as it was before this was made, which it becomes again when
/// this is dropped.
#[derive(Debug)]
pub(crate) struct MatmulPrecision {
    before: u8,
}

impl MatmulPrecision {
    /// Lets products on GPUs use TensorFloat-32, or not.
    pub(crate) fn with_tf32(allow: bool) -> Result<Self> {
        let precision = if allow { sys::MATMUL_HIGH } else { sys::MATMUL_HIGHEST };
        // SAFETY: `err` is valid for a write.
        let before = call(|err| unsafe { sys::tamp_matmul_precision(precision, err) })?;
        Ok(Self { before })
    }
}

impl Drop for MatmulPrecision {
    fn drop(&mut self) {
        // SAFETY: `err` is valid for a write. The precision is one that libtorch had, so that it takes it again.
        drop(call(|err| unsafe { sys::tamp_matmul_precision(self.before, err) }));
    }
}

/// An asynchronous copy of a number from a device to the host.
#[derive(Debug)]
pub(crate) struct Arrival(*mut sys::Arrival);

// SAFETY: it owns a tensor and an event of libtorch, which are not bound to a thread.
unsafe impl Send for Arrival {}

impl Arrival {
    /// Starts to copy an f32 tensor of one element to the host. Does not synchronize.
    pub(crate) fn new(source: &Tensor) -> Result<Self> {
        // SAFETY: `source` is a live tensor, and `err` is valid for a write.
        call(|err| unsafe { sys::tamp_arrival_new(source.as_ptr(), err) }).map(Self)
    }

    /// Returns the number, or `None` if it has not arrived yet. Never synchronizes.
    pub(crate) fn poll(&self) -> Result<Option<f64>> {
        let mut number = 0.0;
        // SAFETY: the pointer came from `tamp_arrival_new`, which succeeded, and is freed in `drop` only; `number` is
        // valid for a write.
        let has_arrived =
            call(|err| unsafe { sys::tamp_arrival_poll(self.0, &mut number, err) })? != 0;
        Ok(has_arrived.then_some(number))
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        // SAFETY: the pointer came from `tamp_arrival_new`, and is not used any more.
        unsafe { sys::tamp_arrival_free(self.0) }
    }
}

//! Availability and abilities of CUDA, and asynchronous copies of numbers to the host.

use std::ffi::CStr;

use tch::Tensor;

use super::{call, given};
use crate::error::Result;
use crate::sys;

/// Returns whether libtorch_cuda is linked into this program.
pub(crate) fn cuda_is_linked() -> bool {
    // SAFETY: takes nothing and reads a constant.
    unsafe { sys::tamp_cuda_is_linked() != 0 }
}

/// The version of libtorch.
pub(crate) fn libtorch_version() -> String {
    // SAFETY: takes nothing and returns a string literal.
    let version = unsafe { CStr::from_ptr(sys::tamp_libtorch_version()) };
    version.to_string_lossy().into_owned()
}

/// Initializes CUDA. The error has libtorch's message.
pub(crate) fn cuda_initialize() -> Result<()> {
    // SAFETY: `err` is valid for a write.
    call(|err| unsafe { sys::tamp_cuda_initialize(err) })
}

/// Returns whether the CUDA device of this index, which can be used, has instructions for bf16.
pub(crate) fn cuda_has_bf16(index: usize) -> Result<bool> {
    let index = i8::try_from(index).unwrap_or(i8::MAX);
    // SAFETY: `err` is valid for a write, and libtorch checks the index.
    Ok(call(|err| unsafe { sys::tamp_cuda_has_bf16(index, err) })? != 0)
}

/// The precisions of f32 matrix products, the highest first.
const MATMUL: [u8; 3] = [sys::MATMUL_HIGHEST, sys::MATMUL_HIGH, sys::MATMUL_MEDIUM];

/// Sets how precise f32 matrix products are, in all threads, and returns how precise they were: 0 is the highest, 2 the
/// lowest precision.
pub(crate) fn set_matmul_precision(precision: usize) -> Result<usize> {
    // SAFETY: `err` is valid for a write, and the shim checks the number.
    let before = call(|err| unsafe { sys::tamp_matmul_precision(MATMUL[precision], err) })?;
    Ok(MATMUL.iter().position(|known| *known == before).unwrap_or_default())
}

/// Sets whether the partial sums of fp16 and of bf16 matrix products may be rounded on CUDA devices, in all threads,
/// and returns which might be.
pub(crate) fn set_reduced_precision_reduction([fp16, bf16]: [bool; 2]) -> Result<[bool; 2]> {
    let allowed = u8::from(fp16) * sys::REDUCTION_FP16 + u8::from(bf16) * sys::REDUCTION_BF16;
    // SAFETY: `err` is valid for a write.
    let before = call(|err| unsafe { sys::tamp_reduced_precision_reduction(allowed, err) })?;
    Ok([sys::REDUCTION_FP16, sys::REDUCTION_BF16].map(|bit| before & bit != 0))
}

/// An asynchronous copy of `N` numbers from a device to the host.
#[derive(Debug)]
pub(crate) struct Arrival<const N: usize = 1>(*mut sys::Arrival);

// SAFETY: it owns a tensor and an event of libtorch, which are not bound to a thread.
unsafe impl<const N: usize> Send for Arrival<N> {}

impl<const N: usize> Arrival<N> {
    /// Starts to copy a contiguous f32 or f64 tensor of `N` elements to the host. Does not synchronize.
    pub(crate) fn new(source: &Tensor) -> Result<Self> {
        // SAFETY: `source` is a live tensor, and `err` is valid for a write.
        call(|err| unsafe { sys::tamp_arrival_new(source.as_ptr(), err) }).map(Self)
    }

    /// Returns the numbers, or `None` if they have not arrived yet. Never synchronizes.
    pub(crate) fn poll_all(&self) -> Result<Option<[f64; N]>> {
        let mut numbers = [0.0; N];
        let array = numbers.as_mut_ptr();
        // SAFETY: the pointer came from `tamp_arrival_new`, which succeeded, and is freed in `drop` only; the array is
        // valid for `N` writes.
        let arrived = call(|err| unsafe { sys::tamp_arrival_poll(self.0, array, N, err) })? != 0;
        Ok(arrived.then_some(numbers))
    }
}

impl Arrival {
    /// Returns the number, or `None` if it has not arrived yet. Never synchronizes.
    pub(crate) fn poll(&self) -> Result<Option<f64>> {
        Ok(self.poll_all()?.map(|[number]| number))
    }
}

/// An asynchronous copy of a tensor of a CUDA device in pinned memory. The device makes it in the order of the calling
/// thread's stream: after what that was given before, and before what it is given afterwards.
#[derive(Debug)]
pub(crate) struct Staged(*mut sys::Arrival);

// SAFETY: it owns a tensor and an event of libtorch, which are not bound to a thread.
unsafe impl Send for Staged {}
// SAFETY: threads that share it can only wait for the event, which CUDA allows, and take a handle of the tensor.
unsafe impl Sync for Staged {}

impl Staged {
    /// Starts to copy a tensor. Does not synchronize.
    pub(crate) fn new(source: &Tensor) -> Result<Self> {
        // SAFETY: `source` is a live tensor, and `err` is valid for a write.
        call(|err| unsafe { sys::tamp_arrival_new(source.as_ptr(), err) }).map(Self)
    }

    /// Starts to copy a tensor of the same dtype and shape into the same memory, once the last copy has arrived.
    pub(crate) fn copy(&mut self, source: &Tensor) -> Result<()> {
        // SAFETY: the pointer came from `tamp_arrival_new`, and `source` is a live tensor.
        call(|err| unsafe { sys::tamp_arrival_again(self.0, source.as_ptr(), err) })
    }

    /// Waits until the elements have arrived.
    pub(crate) fn wait(&self) -> Result<()> {
        // SAFETY: the pointer came from `tamp_arrival_new`, and is freed in `drop` only.
        call(|err| unsafe { sys::tamp_arrival_wait(self.0, err) })
    }

    /// The copy, which may be read after [`wait`](Self::wait).
    pub(crate) fn tensor(&self) -> Result<Tensor> {
        // SAFETY: the pointer came from `tamp_arrival_new`, and is freed in `drop` only.
        given(call(|err| unsafe { sys::tamp_arrival_copy(self.0, err) })?)
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        // SAFETY: the pointer came from `tamp_arrival_new`, and is not used any more.
        unsafe { sys::tamp_arrival_free(self.0) }
    }
}

impl<const N: usize> Drop for Arrival<N> {
    fn drop(&mut self) {
        // SAFETY: the pointer came from `tamp_arrival_new`, and is not used any more.
        unsafe { sys::tamp_arrival_free(self.0) }
    }
}

//! What tells memory from other memory that lies, or lay, in the same place.

use std::ops::Deref;

use tch::Tensor;

use super::{call, gradients_inspect, pointer, pointers};
use crate::error::{Error, Result};
use crate::sys;

/// The shape of a tensor; an error for one that has none, where tch panics.
pub(crate) fn sizes(tensor: &Tensor) -> Result<Vec<i64>> {
    let mut sizes = vec![0; 8];
    loop {
        let (out, room) = (sizes.as_mut_ptr(), sizes.len());
        // SAFETY: the tensor is alive, and the shim writes at most `room` numbers to `out`.
        let dim = call(|err| unsafe { sys::tamp_sizes(tensor.as_ptr(), out, room, err) })?;
        sizes.resize(dim, 0);
        if dim <= room {
            return Ok(sizes);
        }
    }
}

/// Gradients as they were. Nobody else is given their memory while this lives, so that a gradient with the same memory
/// is the same one.
#[derive(Debug, Default)]
pub(crate) struct HeldGradients(Vec<sys::Gradient>);

impl HeldGradients {
    /// Holds the gradients of the parameters, which `gradients` describe.
    pub(crate) fn new(parameters: &[Tensor], gradients: Vec<sys::Gradient>) -> Result<Self> {
        let tensors = pointers(parameters);
        if tensors.len() != gradients.len() {
            return Err(Error::Torch(
                "a parameter was added while gradients were looked at".into(),
            ));
        }
        let (array, count, known) = (tensors.as_ptr(), tensors.len(), gradients.as_ptr());
        // SAFETY: both arrays have `count` elements, and the borrow keeps the parameters alive.
        call(|err| unsafe { sys::tamp_gradients_hold(array, count, known, err) })?;
        Ok(Self(gradients))
    }

    /// Looks at the gradients of the parameters and holds them.
    pub(crate) fn of(parameters: &[Tensor]) -> Result<Self> {
        Self::new(parameters, gradients_inspect(parameters)?)
    }

    /// Exchanges the gradients in one place of two lists.
    pub(crate) fn exchange(&mut self, other: &mut Self, index: usize) {
        std::mem::swap(&mut self.0[index], &mut other.0[index]);
    }
}

impl Deref for HeldGradients {
    type Target = [sys::Gradient];

    fn deref(&self) -> &[sys::Gradient] {
        &self.0
    }
}

impl Drop for HeldGradients {
    fn drop(&mut self) {
        for gradient in &self.0 {
            // SAFETY: `new` has held it, and it is released nowhere else.
            unsafe { sys::tamp_memory_release(gradient.memory) }
        }
    }
}

/// How parameters were at some time: which memory they had, which nobody else is given meanwhile, and how often it had
/// been written to.
#[derive(Debug, Default)]
pub(crate) struct Stamps(Vec<sys::Stamp>);

impl Stamps {
    /// Tells which of the parameters are not as they were. One that has no stamp is not.
    pub(crate) fn compare(&mut self, parameters: &[Tensor]) -> Result<Vec<bool>> {
        let tensors = pointers(parameters);
        self.0.resize_with(tensors.len(), sys::Stamp::default);
        let mut changed = vec![0u8; tensors.len()];
        let (array, count, out) = (tensors.as_ptr(), tensors.len(), changed.as_mut_ptr());
        // SAFETY: all arrays have `count` elements, and the borrow keeps the tensors alive.
        call(|err| unsafe {
            sys::tamp_stamps_compare(array, count, self.0.as_ptr(), out, err);
        })?;
        Ok(changed.into_iter().map(|changed| changed != 0).collect())
    }

    /// Has the stamps say how the parameters are now.
    pub(crate) fn take(&mut self, parameters: &[Tensor]) -> Result<()> {
        let tensors = pointers(parameters);
        self.0.resize_with(tensors.len(), sys::Stamp::default);
        let (array, count, stamps) = (tensors.as_ptr(), tensors.len(), self.0.as_mut_ptr());
        // SAFETY: both arrays have `count` elements, and the borrow keeps the tensors alive.
        call(|err| unsafe { sys::tamp_stamps_take(array, count, stamps, err) })
    }

    /// Has one stamp say how its parameter is now.
    pub(crate) fn take_one(&mut self, index: usize, parameter: &Tensor) -> Result<()> {
        let needed = self.0.len().max(index + 1);
        self.0.resize_with(needed, sys::Stamp::default);
        let tensor = [pointer(parameter)];
        let stamp: *mut sys::Stamp = &mut self.0[index];
        // SAFETY: the array has one element, `stamp` is valid for a write, and the borrow keeps the tensor alive.
        call(|err| unsafe { sys::tamp_stamps_take(tensor.as_ptr(), 1, stamp, err) })
    }

    /// Whether the parameter has a stamp.
    pub(crate) fn has(&self, index: usize) -> bool {
        self.0.get(index).is_some_and(|stamp| stamp.memory != 0)
    }

    pub(crate) fn forget(&mut self, index: usize) {
        if let Some(stamp) = self.0.get_mut(index) {
            release(stamp);
        }
    }
}

impl Drop for Stamps {
    fn drop(&mut self) {
        self.0.iter_mut().for_each(release);
    }
}

fn release(stamp: &mut sys::Stamp) {
    let memory = std::mem::take(stamp).memory;
    // SAFETY: only `tamp_stamps_take` writes it, which has held it, and nobody else knows it any more.
    unsafe { sys::tamp_memory_release(memory) }
}

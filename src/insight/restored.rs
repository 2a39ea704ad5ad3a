//! The buffers of a model while iterations are run again.

use tch::Tensor;

use crate::buffers::BufferSnapshot;
use crate::error::Result;

/// The buffers as they were when an iteration began and when it was to be explained. They become the latter again when
/// this is dropped.
#[derive(Debug)]
pub(super) struct Buffers<'a> {
    began: &'a mut BufferSnapshot,
    present: BufferSnapshot,
}

/// A copy of those buffers that an iteration is likely to change, such as running statistics. Other variables that are
/// not trainable, such as frozen weights, can be as large as a model.
pub(super) fn statistics(buffers: &[Tensor]) -> Result<BufferSnapshot> {
    BufferSnapshot::of(buffers.iter().filter(|buffer| buffer.dim() <= 1))
}

impl<'a> Buffers<'a> {
    pub(super) fn new(began: &'a mut BufferSnapshot, buffers: &[Tensor]) -> Result<Self> {
        Ok(Self { began, present: BufferSnapshot::of(buffers)? })
    }

    /// Puts the buffers into the state in which a run begins.
    pub(super) fn begin(&mut self) -> Result<()> {
        self.present.restore()?;
        self.began.restore()
    }
}

impl Drop for Buffers<'_> {
    fn drop(&mut self) {
        // The same copies were possible the other way round.
        drop(self.present.restore());
    }
}

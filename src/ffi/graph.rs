//! Graphs of CUDA.

use tch::Tensor;

use super::{call, pointer};
use crate::error::Result;
use crate::sys;

/// A graph of a CUDA device, and the stream on which it is captured.
#[derive(Debug)]
pub(crate) struct Graph(*mut sys::Graph);

impl Graph {
    /// Makes an empty graph.
    pub(crate) fn new(index: usize) -> Result<Self> {
        let index = i8::try_from(index).unwrap_or(i8::MAX);
        // SAFETY: `err` is valid for a write, and libtorch checks the index.
        call(|err| unsafe { sys::tamp_graph_new(index, err) }).map(Self)
    }

    /// Calls a function of the shim that takes a graph and fails with a message.
    fn call(
        &self,
        function: unsafe extern "C" fn(*mut sys::Graph, *mut *mut std::ffi::c_char),
    ) -> Result<()> {
        // SAFETY: each of these functions takes a graph from `tamp_graph_new`, which succeeded and is freed in `drop`
        // only, and an `err` that is valid for a write.
        call(|err| unsafe { function(self.0, err) })
    }

    /// Makes the graph's stream the thread's current one, after what was given to the stream before.
    pub(crate) fn enter(&self) -> Result<()> {
        self.call(sys::tamp_graph_enter)
    }

    /// Makes the stream before `enter` the current one again, after what was given to the graph's.
    pub(crate) fn leave(&self) -> Result<()> {
        self.call(sys::tamp_graph_leave)
    }

    /// Begins a capture. Synchronizes.
    pub(crate) fn begin(&self) -> Result<()> {
        self.call(sys::tamp_graph_begin)
    }

    /// Ends a capture, also one that has failed.
    pub(crate) fn end(&self) -> Result<()> {
        self.call(sys::tamp_graph_end)
    }

    /// Launches the captured graph.
    pub(crate) fn replay(&self) -> Result<()> {
        self.call(sys::tamp_graph_replay)
    }
}

/// Copies numbers to an f32 tensor of as many elements, for what follows on the stream. Does not synchronize.
pub(crate) fn graph_write(to: &Tensor, numbers: &[f32]) -> Result<()> {
    let (array, count) = (numbers.as_ptr(), numbers.len());
    // SAFETY: the array has `count` elements; `to` is a live tensor, which is changed in place through libtorch's own
    // handle, which aliases freely.
    call(|err| unsafe { sys::tamp_graph_write(pointer(to), array, count, err) })
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: the pointer came from `tamp_graph_new`, and is not used any more.
        unsafe { sys::tamp_graph_free(self.0) }
    }
}

//! Names for parts of a model.

use std::cell::Cell;

use crate::error::Result;
use crate::ffi::insight::Name;

thread_local! {
    /// How many recordings run on this thread.
    static RECORDINGS: Cell<usize> = const { Cell::new(0) };
}

/// Counts a recording on this thread until it is dropped.
#[derive(Debug)]
pub(super) struct Counted(());

impl Counted {
    pub(super) fn new() -> Self {
        RECORDINGS.set(RECORDINGS.get() + 1);
        Self(())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        RECORDINGS.set(RECORDINGS.get() - 1);
    }
}

/// Runs `f` under a name, by which an [`Explanation`](super::Explanation) calls what `f` computes, forward and backward.
/// Names nest: inside of `encoder`, the name `layers.3` is reported as `encoder.layers.3`. While nothing is recorded on
/// this thread, it only calls `f`.
///
/// Operators that use a parameter are known by its name in the `VarStore` and need no other. Use this for parts without
/// parameters, such as the products of an attention. The counterpart of `torch.profiler.record_function`.
///
/// # Examples
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use tch_amp::insight::named;
///
/// let x = Tensor::ones([2, 2], (Kind::Float, Device::Cpu));
/// let scores = named("attention", || x.matmul(&x));
/// assert_eq!(scores.size(), [2, 2]);
/// ```
pub fn named<T>(name: &str, f: impl FnOnce() -> T) -> T {
    let recorded = RECORDINGS.get() > 0;
    // A name that cannot be made is missing in a report, which is no reason to fail here.
    let name = recorded.then(|| Name::begin(name)).and_then(Result::ok);
    let result = f();
    drop(name);
    result
}

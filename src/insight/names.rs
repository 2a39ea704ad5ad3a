//! Names for parts of a model.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::Result;
use crate::ffi::insight::Name;

/// How many recordings run in this process. The threads of a backward pass take part in that of another thread.
static RECORDINGS: AtomicUsize = AtomicUsize::new(0);

/// Counts a recording until it is dropped.
#[derive(Debug)]
pub(super) struct Counted(());

impl Counted {
    pub(super) fn new() -> Self {
        RECORDINGS.fetch_add(1, Ordering::Relaxed);
        Self(())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        RECORDINGS.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Runs `f` under a name, by which an [`Explanation`](super::Explanation) calls what `f` computes, forward and
/// backward. Names nest: inside of `encoder`, the name `layers.3` is reported as `encoder.layers.3`. While nothing is
/// recorded, it only calls `f`.
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
    let recorded = RECORDINGS.load(Ordering::Relaxed) > 0;
    // A name that cannot be made is missing in a report, which is no reason to fail here.
    let name = recorded.then(|| Name::begin(name)).and_then(Result::ok);
    let result = f();
    drop(name);
    result
}

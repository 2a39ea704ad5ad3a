//! Averages of weights, and the statistics of batch normalization.

use std::ptr::{self, NonNull};

use tch::Tensor;

use super::{Counted, call, given, pointers};
use crate::error::{Error, Result};
use crate::sys;

/// The options of an average.
#[derive(Clone, Copy, Debug)]
pub(crate) enum AverageOptions {
    Ema { decay: f64, warmup: bool, debias: bool },
    Swa,
}

impl AverageOptions {
    fn raw(self) -> sys::AverageOptions {
        let (kind, decay, warmup, debias) = match self {
            Self::Ema { decay, warmup, debias } => (sys::AVERAGE_EMA, decay, warmup, debias),
            Self::Swa => (sys::AVERAGE_SWA, 0.0, false, false),
        };
        let (warmup, debias) = (warmup.into(), debias.into());
        sys::AverageOptions { decay, kind, warmup, debias }
    }
}

/// Counts an update on a device, after so many with so much left of the start, unless a flag there is set: see
/// `tamp_average_count`. Does not synchronize.
pub(crate) fn average_count(
    counted: Counted<(u64, f64), &Tensor>,
    skips: Option<&Tensor>,
    options: AverageOptions,
) -> Result<Tensor> {
    let (tensor, updates, rest) = match counted {
        Counted::Host((updates, rest)) => (ptr::null(), updates as f64, rest),
        Counted::Device(tensor) => (tensor.as_ptr(), 0.0, 0.0),
    };
    let skips = skips.map_or(ptr::null(), |tensor| tensor.as_ptr());
    let options = options.raw();
    // SAFETY: both tensors are null or live, and `options` and `err` are valid.
    given(call(|err| unsafe {
        sys::tamp_average_count(tensor, updates, rest, skips, &options, err)
    })?)
}

/// Moves averages towards parameters by a weight. A count on a device is read for parameters on the CPU: that
/// synchronizes.
pub(crate) fn average_update(
    averages: &[Tensor],
    parameters: &[Tensor],
    weight: Counted<f64, &Tensor>,
) -> Result<()> {
    assert_eq!(averages.len(), parameters.len(), "one average for each parameter");
    let (number, counted) = match weight {
        Counted::Host(number) => (number, ptr::null()),
        Counted::Device(tensor) => (0.0, tensor.as_ptr()),
    };
    let (averages, parameters) = (pointers(averages), pointers(parameters));
    let (count, averages, parameters) = (averages.len(), averages.as_ptr(), parameters.as_ptr());
    // SAFETY: both arrays have `count` live tensors, `counted` is null or a live tensor, and `err` is valid for a
    // write; the averages are changed in place through libtorch's own handles, which alias freely.
    call(|err| unsafe {
        sys::tamp_average_update(averages, parameters, count, number, counted, err)
    })
}

/// The calls that a running statistic had in a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Calls {
    /// None, of whatever kind: its layer has not run, or updates it by arithmetic of its own.
    NeverMet,
    /// As many in training, whose mean it is.
    Averaged(u64),
    /// Of instance normalization, which has moved it on from the model's own numbers.
    Kept,
}

/// Averages running statistics over the calls of their layers on this thread until it is dropped: see
/// `tamp_statistics_begin`.
#[derive(Debug)]
pub(crate) struct StatisticsPass {
    /// The pointer also keeps the pass on its thread.
    raw: NonNull<sys::Statistics>,
    count: usize,
}

impl StatisticsPass {
    /// Begins a pass with the statistics that the layers write to, the model's own, and whether they are variances.
    pub(crate) fn begin(running: &[Tensor], own: &[Tensor], variances: &[bool]) -> Result<Self> {
        assert!(running.len() == own.len() && own.len() == variances.len(), "one of each");
        let count = running.len();
        let (running, own) = (pointers(running), pointers(own));
        let variances: Vec<u8> = variances.iter().map(|&is| is.into()).collect();
        // SAFETY: the arrays have `count` elements, the tensors are live, and `err` is valid for a write; the pass has
        // handles of its own.
        let raw = call(|err| unsafe {
            let (running, own) = (running.as_ptr(), own.as_ptr());
            sys::tamp_statistics_begin(running, own, variances.as_ptr(), count, err)
        })?;
        let raw = NonNull::new(raw).ok_or_else(|| Error::Torch("no pass".to_owned()))?;
        Ok(Self { raw, count })
    }

    /// The calls of a statistic, by its place.
    pub(crate) fn calls(&self, index: usize) -> Calls {
        assert!(index < self.count, "a statistic of the pass");
        // SAFETY: the pass is alive, and has `count` statistics.
        let calls = unsafe { sys::tamp_statistics_calls(self.raw.as_ptr(), index) };
        match calls {
            sys::STATISTICS_NEVER_MET => Calls::NeverMet,
            sys::STATISTICS_KEPT => Calls::Kept,
            calls => Calls::Averaged(calls.unsigned_abs()),
        }
    }
}

impl Drop for StatisticsPass {
    fn drop(&mut self) {
        // SAFETY: the pass is alive, was begun on this thread, and is not used again. Passes are locals of a function
        // that runs the others inside of it, so this is the innermost one.
        unsafe { sys::tamp_statistics_end(self.raw.as_ptr()) }
    }
}

/// Returns the momentum with which a layer updates its statistics, and counts the call: see
/// `tamp_statistics_momentum`.
#[cfg(feature = "distributed")]
pub(crate) fn statistics_momentum(
    mean: &Tensor,
    variance: &Tensor,
    trains: bool,
    momentum: f64,
) -> Result<f64> {
    let (mean, variance) = (mean.as_ptr(), variance.as_ptr());
    // SAFETY: both tensors are live, and `err` is valid for a write; the shim writes to statistics of a pass through
    // libtorch's own handles, which alias freely.
    call(|err| unsafe {
        sys::tamp_statistics_momentum(mean, variance, trains.into(), momentum, err)
    })
}

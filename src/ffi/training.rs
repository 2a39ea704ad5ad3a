//! What a training run needs besides the scaler and the optimizers: averages of weights, and the memory of devices.

use std::ptr::{self, NonNull};

use tch::{Device, Tensor};

use super::{call, device_type, given, pointers};
use crate::error::{Error, Result};
use crate::sys;

/// The options of an average.
#[derive(Clone, Copy, Debug)]
pub(crate) enum AverageOptions {
    Ema { decay: f64, warmup: bool, debias: bool },
    Swa,
}

impl AverageOptions {
    fn raw(self) -> sys::training::AverageOptions {
        let (kind, decay, warmup, debias) = match self {
            Self::Ema { decay, warmup, debias } => {
                (sys::training::AVERAGE_EMA, decay, warmup, debias)
            }
            Self::Swa => (sys::training::AVERAGE_SWA, 0.0, false, false),
        };
        let (warmup, debias) = (warmup.into(), debias.into());
        sys::training::AverageOptions { decay, kind, warmup, debias }
    }
}

/// The updates of an average that were counted before.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Counted<'a> {
    Host { updates: u64, rest: f64 },
    Device(&'a Tensor),
}

/// Counts an update on a device, unless a flag there is set: see `tamp_average_count`. Does not synchronize.
pub(crate) fn average_count(
    counted: Counted<'_>,
    skips: Option<&Tensor>,
    options: AverageOptions,
) -> Result<Tensor> {
    let (tensor, updates, rest) = match counted {
        Counted::Host { updates, rest } => (ptr::null(), updates as f64, rest),
        Counted::Device(tensor) => (tensor.as_ptr(), 0.0, 0.0),
    };
    let skips = skips.map_or(ptr::null(), |tensor| tensor.as_ptr());
    let options = options.raw();
    // SAFETY: both tensors are null or live, and `options` and `err` are valid.
    given(call(|err| unsafe {
        sys::training::tamp_average_count(tensor, updates, rest, skips, &options, err)
    })?)
}

/// What moves averages towards parameters.
#[derive(Clone, Copy, Debug)]
pub(crate) enum AverageWeight<'a> {
    Host(f64),
    /// A count on a device, which is read for parameters on the CPU: that synchronizes.
    Counted(&'a Tensor),
}

/// Moves averages towards parameters.
pub(crate) fn average_update(
    averages: &[Tensor],
    parameters: &[Tensor],
    weight: AverageWeight<'_>,
) -> Result<()> {
    assert_eq!(averages.len(), parameters.len(), "one average for each parameter");
    let (number, counted) = match weight {
        AverageWeight::Host(number) => (number, ptr::null()),
        AverageWeight::Counted(tensor) => (0.0, tensor.as_ptr()),
    };
    let (averages, parameters) = (pointers(averages), pointers(parameters));
    let (count, averages, parameters) = (averages.len(), averages.as_ptr(), parameters.as_ptr());
    // SAFETY: both arrays have `count` live tensors, `counted` is null or a live tensor, and `err` is valid for a write;
    // the averages are changed in place through libtorch's own handles, which alias freely.
    call(|err| unsafe {
        sys::training::tamp_average_update(averages, parameters, count, number, counted, err)
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
    raw: NonNull<sys::training::Statistics>,
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
            sys::training::tamp_statistics_begin(running, own, variances.as_ptr(), count, err)
        })?;
        let raw = NonNull::new(raw).ok_or_else(|| Error::Torch("no pass".to_owned()))?;
        Ok(Self { raw, count })
    }

    /// The calls of a statistic, by its place.
    pub(crate) fn calls(&self, index: usize) -> Calls {
        assert!(index < self.count, "a statistic of the pass");
        // SAFETY: the pass is alive, and has `count` statistics.
        let calls = unsafe { sys::training::tamp_statistics_calls(self.raw.as_ptr(), index) };
        match calls {
            sys::training::STATISTICS_NEVER_MET => Calls::NeverMet,
            sys::training::STATISTICS_KEPT => Calls::Kept,
            calls => Calls::Averaged(calls.unsigned_abs()),
        }
    }
}

impl Drop for StatisticsPass {
    fn drop(&mut self) {
        // SAFETY: the pass is alive, was begun on this thread, and is not used again. Passes are locals of a function
        // that runs the others inside of it, so this is the innermost one.
        unsafe { sys::training::tamp_statistics_end(self.raw.as_ptr()) }
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
        sys::training::tamp_statistics_momentum(mean, variance, trains.into(), momentum, err)
    })
}

/// When a number is a spike: see `tamp_spike_options`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpikeOptions {
    pub(crate) deviations: f64,
    pub(crate) window: u32,
    pub(crate) warmup: u32,
    pub(crate) max_in_a_row: u32,
}

/// Judges the next number of a history, and returns the new one: see `tamp_spikes_judge`. Does not synchronize.
pub(crate) fn spikes_judge(
    history: Option<&Tensor>,
    value: &Tensor,
    other: Option<&Tensor>,
    options: SpikeOptions,
) -> Result<Tensor> {
    let [history, other] =
        [history, other].map(|tensor| tensor.map_or(ptr::null(), |tensor| tensor.as_ptr()));
    let raw = sys::training::SpikeOptions {
        deviations: options.deviations,
        window: options.window.into(),
        warmup: options.warmup.into(),
        max_in_a_row: options.max_in_a_row.into(),
    };
    let value = value.as_ptr();
    // SAFETY: every tensor is null or live, `value` is live, and the options and `err` are valid.
    given(call(|err| unsafe {
        sys::training::tamp_spikes_judge(history, value, other, &raw, err)
    })?)
}

/// Returns whether the last step of a history is skipped, as an f32 of no dimensions on its device.
pub(crate) fn spikes_flag(history: &Tensor) -> Result<Tensor> {
    // SAFETY: `history` is a live tensor, and `err` is valid for a write.
    given(call(|err| unsafe { sys::training::tamp_spikes_flag(history.as_ptr(), err) })?)
}

/// Returns the spikes that a history has counted, and the numbers that were not finite. Synchronizes on a device.
pub(crate) fn spikes_counts(history: &Tensor) -> Result<[f64; 2]> {
    let place = |place: u8| Ok(history.f_narrow(0, place.into(), 1)?);
    let [spikes, non_finite]: [Result<Tensor>; 2] =
        [place(sys::training::SPIKES_FOUND), place(sys::training::SPIKES_NON_FINITE)];
    let numbers = super::numbers_read(&[&spikes?, &non_finite?])?;
    Ok([numbers[0], numbers[1]])
}

/// Returns what a history of spikes, which is on the CPU, has before its window: counts of steps.
pub(crate) fn spikes_state(history: &Tensor) -> Result<Vec<f64>> {
    Ok(Vec::try_from(history.f_narrow(0, 0, sys::training::SPIKES_WINDOW.into())?)?)
}

/// Returns the length of the history of a window.
pub(crate) fn spikes_length(window: u32) -> i64 {
    i64::from(sys::training::SPIKES_WINDOW) + i64::from(window)
}

/// The type and the index of a device, as libtorch numbers them.
fn device_codes(device: Device) -> Result<(i8, i8)> {
    let index = match device {
        Device::Cuda(index) => i8::try_from(index)
            .map_err(|_| Error::Torch(format!("there is no CUDA device {index}")))?,
        _ => 0,
    };
    Ok((device_type(device)?, index))
}

/// The bytes that libtorch's allocator of a device counts: in tensors now and at most, and taken from the device now
/// and at most.
pub(crate) fn device_memory(device: Device) -> Result<[i64; 4]> {
    let (device_type, index) = device_codes(device)?;
    let mut out = sys::training::DeviceMemory::default();
    // SAFETY: `out` and `err` are valid for writes.
    call(|err| unsafe {
        sys::training::tamp_device_memory_read(device_type, index, &mut out, err)
    })?;
    Ok([out.allocated, out.max_allocated, out.reserved, out.max_reserved])
}

/// Resets the peaks of a device.
pub(crate) fn device_memory_reset(device: Device) -> Result<()> {
    let (device_type, index) = device_codes(device)?;
    // SAFETY: `err` is valid for a write.
    call(|err| unsafe { sys::training::tamp_device_memory_reset(device_type, index, err) })
}

//! Losses that are scaled, the update of the scale with the flags that it depends on, and the histories of spikes.

use std::ptr;

use tch::Tensor;

use super::{call, given, pointer, pointers};
use crate::error::Result;
use crate::sys;

/// Returns whether any of the one-element tensors is not zero. Synchronizes once.
pub(crate) fn any_nonzero(tensors: &[&Tensor]) -> Result<bool> {
    let tensors = pointers(tensors.iter().copied());
    // SAFETY: the array has `tensors.len()` elements, and the borrows keep the tensors alive.
    call(|err| unsafe { sys::tamp_any_nonzero(tensors.as_ptr(), tensors.len(), err) })
        .map(|any| any != 0)
}

/// Returns a flag that is 1 if any of the flags is, on the first GPU among their devices. A single flag is returned
/// itself.
pub(crate) fn flags_join<'a>(flags: impl IntoIterator<Item = &'a Tensor>) -> Result<Tensor> {
    let tensors = pointers(flags);
    // SAFETY: the array has `tensors.len()` elements, and the caller's borrows keep the tensors alive.
    given(call(|err| unsafe { sys::tamp_flags_join(tensors.as_ptr(), tensors.len(), err) })?)
}

/// The counts of a scale that tolerates some overflows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct OverflowCounts {
    /// How many overflows are left until the hysteresis is used up.
    pub(crate) hysteresis: i64,
    /// The iterations since the scale last backed off or could grow.
    pub(crate) iterations: i64,
    /// The overflows among these iterations.
    pub(crate) overflows: i64,
}

impl OverflowCounts {
    /// Returns the elements of the shim's tensor.
    pub(crate) fn to_numbers(self) -> [i64; 3] {
        let mut numbers = [0; 3];
        numbers[sys::TOLERANCE_HYSTERESIS] = self.hysteresis;
        numbers[sys::TOLERANCE_ITERATIONS] = self.iterations;
        numbers[sys::TOLERANCE_OVERFLOWS] = self.overflows;
        numbers
    }

    /// Makes the counts from the elements of the shim's tensor, which are exact up to 2^53. All are zero if there is no
    /// such tensor.
    pub(crate) fn from_numbers(numbers: &[f64]) -> Self {
        let number = |place: usize| numbers.get(place).map_or(0, |number| *number as i64);
        Self {
            hysteresis: number(sys::TOLERANCE_HYSTERESIS),
            iterations: number(sys::TOLERANCE_ITERATIONS),
            overflows: number(sys::TOLERANCE_OVERFLOWS),
        }
    }
}

/// How an iteration changes a scale. The last three fields apply only to a scale with counts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ScaleRule {
    pub(crate) growth_factor: f64,
    pub(crate) backoff_factor: f64,
    pub(crate) growth_interval: i64,
    pub(crate) min_scale: f64,
    pub(crate) max_scale: f64,
    pub(crate) hysteresis: i64,
    pub(crate) tolerance: f64,
    pub(crate) consecutive: bool,
}

impl ScaleRule {
    fn raw(&self) -> sys::ScaleRule {
        sys::ScaleRule {
            growth_factor: self.growth_factor,
            backoff_factor: self.backoff_factor,
            growth_interval: self.growth_interval,
            min_scale: self.min_scale,
            max_scale: self.max_scale,
            hysteresis: self.hysteresis,
            tolerance: self.tolerance,
            consecutive: self.consecutive.into(),
        }
    }
}

/// A scale at the end of an iteration, with the flags for non-finite gradients.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScaleUpdate<'a> {
    pub(crate) scale: &'a Tensor,
    pub(crate) tracker: &'a Tensor,
    pub(crate) counts: Option<&'a Tensor>,
    pub(crate) found_infs: &'a [&'a Tensor],
    pub(crate) rule: ScaleRule,
}

/// Grows or backs off scales, and updates their trackers and counts, in place: all of them or none.
pub(crate) fn scales_update(updates: &[ScaleUpdate<'_>]) -> Result<()> {
    let flags = |update: &ScaleUpdate<'_>| pointers(update.found_infs.iter().copied());
    let flags: Vec<_> = updates.iter().map(flags).collect();
    let raw = updates.iter().zip(&flags).map(|(update, flags)| sys::ScaleUpdate {
        scale: pointer(update.scale),
        tracker: pointer(update.tracker),
        tolerance_counts: update.counts.map_or(ptr::null_mut(), pointer),
        found_infs: flags.as_ptr(),
        count: flags.len(),
        rule: update.rule.raw(),
    });
    let raw: Vec<_> = raw.collect();
    // SAFETY: the array has `raw.len()` elements of the shim's layout, each of which refers to an array in `flags` with
    // its length; the borrows keep every tensor alive, and `counts` is one of them or null.
    call(|err| unsafe { sys::tamp_scales_update(raw.as_ptr(), raw.len(), err) })
}

/// Multiplies a tensor by a factor of one element on any device. The product of half-precision numbers is f32.
pub(crate) fn scaled(tensor: &Tensor, factor: &Tensor) -> Result<Tensor> {
    let (tensor, factor) = (tensor.as_ptr(), factor.as_ptr());
    // SAFETY: both are live tensors, and `err` is valid for a write.
    given(call(|err| unsafe { sys::tamp_scaled(tensor, factor, err) })?)
}

/// Returns whether all elements of floating or complex tensors are finite, as a bool tensor on the device of the first
/// one.
pub(crate) fn all_finite(tensors: &[&Tensor]) -> Result<Tensor> {
    let tensors = pointers(tensors.iter().copied());
    // SAFETY: the array has `tensors.len()` elements, and the borrows keep the tensors alive.
    given(call(|err| unsafe { sys::tamp_all_finite(tensors.as_ptr(), tensors.len(), err) })?)
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
    let raw = sys::SpikeOptions {
        deviations: options.deviations,
        window: options.window.into(),
        warmup: options.warmup.into(),
        max_in_a_row: options.max_in_a_row.into(),
    };
    let value = value.as_ptr();
    // SAFETY: every tensor is null or live, `value` is live, and the options and `err` are valid.
    given(call(|err| unsafe { sys::tamp_spikes_judge(history, value, other, &raw, err) })?)
}

/// Returns whether the last step of a history is skipped, as an f32 of no dimensions on its device.
pub(crate) fn spikes_flag(history: &Tensor) -> Result<Tensor> {
    // SAFETY: `history` is a live tensor, and `err` is valid for a write.
    given(call(|err| unsafe { sys::tamp_spikes_flag(history.as_ptr(), err) })?)
}

/// Returns the spikes that a history has counted, and the numbers that were not finite. Synchronizes on a device.
pub(crate) fn spikes_counts(history: &Tensor) -> Result<[f64; 2]> {
    let place = |place: u8| Ok(history.f_narrow(0, place.into(), 1)?);
    let [spikes, non_finite]: [Result<Tensor>; 2] =
        [place(sys::SPIKES_FOUND), place(sys::SPIKES_NON_FINITE)];
    let numbers = super::numbers_read(&[&spikes?, &non_finite?])?;
    Ok([numbers[0], numbers[1]])
}

/// Returns what a history of spikes, which is on the CPU, has before its window: counts of steps.
pub(crate) fn spikes_state(history: &Tensor) -> Result<Vec<f64>> {
    Ok(Vec::try_from(history.f_narrow(0, 0, sys::SPIKES_WINDOW.into())?)?)
}

/// Returns the length of the history of a window.
pub(crate) fn spikes_length(window: u32) -> i64 {
    i64::from(sys::SPIKES_WINDOW) + i64::from(window)
}

//! Histories that judge whether a number is a spike.

use std::ptr;

use tch::Tensor;

use super::{call, given};
use crate::error::Result;
use crate::sys;

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

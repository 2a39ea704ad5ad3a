//! The update of the scale, and the flags that it depends on.

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

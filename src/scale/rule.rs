//! How an iteration changes a scale: the host's version of libtorch's kernel and `csrc/scale/scale.cpp`.
//!
//! The formula is that of PyTorch's `_amp_update_scale_`: an overflow multiplies the scale by the backoff factor, and
//! `growth_interval` iterations without one multiply it by the growth factor, unless the product is infinite.
//!
//! An overflow leaves the scale unchanged while the hysteresis, as in Megatron-LM and DeepSpeed, is not used up, or
//! while the share of overflows since the last change is below `tolerance`, as in fairseq.

use crate::ffi::{OverflowCounts, ScaleRule};
use crate::scale::GradScalerConfig;

/// The value of a scale on the host. It repeats the arithmetic of libtorch's kernel, which saves transfers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Mirror {
    pub(crate) scale: f32,
    pub(crate) tracker: i32,
    pub(crate) counts: OverflowCounts,
}

impl Mirror {
    /// The initial value of a scale.
    pub(crate) fn new(config: &GradScalerConfig) -> Self {
        let counts = OverflowCounts::new(config);
        Self { scale: config.init_scale as f32, tracker: 0, counts }
    }

    /// Whether an overflow should back the scale off while it is at its lower bound.
    pub(crate) fn is_stuck(self, rule: &ScaleRule) -> bool {
        self.scale <= rule.min_scale as f32 && !self.counts.count(true).tolerate(rule)
    }
}

/// The arithmetic of `_amp_update_scale_`, followed by the bounds: products in f64, rounded to f32, without growth to
/// infinity.
pub(crate) fn next(before: Mirror, overflow: bool, rule: &ScaleRule) -> Mirror {
    let times = |factor: f64| (f64::from(before.scale) * factor) as f32;
    let clamp = |scale: f32| scale.max(rule.min_scale as f32).min(rule.max_scale as f32);
    let counted = before.counts.count(overflow);
    if overflow && counted.tolerate(rule) {
        return Mirror { tracker: 0, counts: counted, ..before };
    }
    if overflow {
        let scale = clamp(times(rule.backoff_factor));
        return Mirror { scale, tracker: 0, counts: counted.restart(false, rule) };
    }
    let tracker = before.tracker + 1;
    if i64::from(tracker) < rule.growth_interval {
        let counts = counted.carry_on(rule);
        return Mirror { scale: clamp(before.scale), tracker, counts };
    }
    let grown = times(rule.growth_factor);
    let scale = clamp(if grown.is_finite() { grown } else { before.scale });
    Mirror { scale, tracker: 0, counts: counted.restart(true, rule) }
}

/// The least that a scale of at least `scale` can be after an iteration.
pub(crate) fn lowest_next(scale: f32, rule: &ScaleRule) -> f32 {
    let backed_off = (f64::from(scale) * rule.backoff_factor) as f32;
    backed_off.max(rule.min_scale as f32).min(rule.max_scale as f32)
}

/// libtorch grows the scale when the tracker *equals* the interval. A tracker beyond the interval would not let the
/// scale grow until an overflow resets it, so it is clamped to one less than the interval.
pub(crate) fn clamp_tracker(tracker: i32, growth_interval: i64) -> i32 {
    i64::from(tracker).min(growth_interval - 1) as i32
}

impl OverflowCounts {
    /// The counts of a new scale.
    pub(crate) fn new(config: &GradScalerConfig) -> Self {
        Self { hysteresis: config.hysteresis.into(), ..Self::default() }
    }

    /// Whether an overflow that has been counted leaves the scale unchanged.
    pub(crate) fn tolerate(&self, rule: &ScaleRule) -> bool {
        let share = self.overflows as f64 / self.iterations as f64;
        self.hysteresis > 0 || share < rule.tolerance
    }

    /// Counts an iteration.
    pub(crate) fn count(self, overflow: bool) -> Self {
        let overflow = i64::from(overflow);
        Self {
            hysteresis: (self.hysteresis - overflow).max(0),
            iterations: self.iterations + 1,
            overflows: self.overflows + overflow,
        }
    }

    /// The counts after an iteration without overflow that does not let the scale grow.
    pub(crate) fn carry_on(self, rule: &ScaleRule) -> Self {
        let restored = rule.consecutive;
        Self { hysteresis: if restored { rule.hysteresis } else { self.hysteresis }, ..self }
    }

    /// The counts after the scale has backed off, or could grow.
    pub(crate) fn restart(self, grown: bool, rule: &ScaleRule) -> Self {
        let hysteresis = if grown { rule.hysteresis } else { self.hysteresis };
        Self { hysteresis, ..Self::default() }
    }
}

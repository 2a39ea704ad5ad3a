//! The options of an adaptive scale, and their ranges.

use crate::error::{Result, ensure};
use crate::ffi::{OverflowCounts, ScaleRule};
#[cfg(doc)]
use crate::scaler::GradScaler;

const INF: f64 = f64::INFINITY;

/// The smallest normal f32, 2^-126, whose reciprocal is finite. Subnormal scales may be flushed to zero.
pub(crate) const SMALLEST: f64 = f32::MIN_POSITIVE as f64;
pub(crate) const LARGEST: f64 = f32::MAX as f64;

/// The options of a [`GradScaler`]: its first scale, when the scale grows and backs off, and when `update` gives up.
/// The defaults are PyTorch's.
///
/// # Examples
///
/// ```
/// use tch::Device;
/// use tch_amp::scaler::GradScalerConfig;
///
/// let scaler = GradScalerConfig { growth_interval: 100, ..Default::default() }.build(Device::Cpu)?;
/// assert_eq!(scaler.get_growth_interval(), 100);
///
/// // DeepSpeed's defaults.
/// let deepspeed = GradScalerConfig {
///     growth_interval: 1000,
///     hysteresis: 2,
///     consecutive_hysteresis: false,
///     min_scale: 1.0,
///     error_at_min_scale: true,
///     ..Default::default()
/// };
/// # assert!(deepspeed.build(Device::Cpu)?.is_enabled());
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradScalerConfig {
    /// The initial scale. Defaults to 65536.
    pub init_scale: f64,
    /// Factor by which the scale is multiplied after `growth_interval` consecutive iterations without overflow; more
    /// than 1. Defaults to 2.
    pub growth_factor: f64,
    /// Factor by which the scale is multiplied when an iteration overflows; between 0 and 1, both excluded. Defaults to
    /// 0.5.
    pub backoff_factor: f64,
    /// Number of consecutive iterations without overflow after which the scale grows; at least 1. Defaults to 2000.
    pub growth_interval: i64,
    /// Whether the scaler is enabled. Defaults to `true`; see [`GradScaler::disabled`].
    pub enabled: bool,
    /// Lower bound of the scale. At least 2^-126, the default, which is the smallest normal f32: a subnormal scale may
    /// be flushed to zero, and at 2^-128 and below its reciprocal overflows, which would turn gradients of zero into
    /// NaN. PyTorch has no such bound.
    pub min_scale: f64,
    /// Upper bound of the scale. Defaults to the largest f32, as in PyTorch. If it equals `min_scale`, the scale is
    /// constant.
    pub max_scale: f64,
    /// Number of overflowing iterations after which the scale backs off; each further one backs it off again until the
    /// hysteresis is restored. Defaults to 1, as in PyTorch. Corresponds to `hysteresis` in Megatron-LM and DeepSpeed,
    /// where the default is 2.
    pub hysteresis: u32,
    /// Whether an iteration without overflow restores the hysteresis, so that only consecutive overflows count; with
    /// `false` only growth does. Defaults to `true`. Corresponds to `consecutive_hysteresis` in DeepSpeed, where the
    /// default is `false`; Megatron-LM behaves as with `false`.
    pub consecutive_hysteresis: bool,
    /// Share of overflowing iterations below which the scale does not back off; from 0 to 1. The share is counted since
    /// the scale last backed off or could grow. Defaults to 0: every overflow counts. Corresponds to `tolerance` in
    /// fairseq, except that fairseq keeps counting the overflows from before a growth.
    pub tolerance: f64,
    /// Number of consecutive overflowing iterations at which `update` returns an error. Defaults to `None`: never, as
    /// in PyTorch. With a limit, `update` synchronizes if no `step` did.
    pub max_consecutive_skips: Option<u32>,
    /// Whether `update` returns an error if an overflow should back the scale off while it is at `min_scale`. Set
    /// `min_scale`, too: its default, 2^-126, is about 140 overflows away from the initial scale. Defaults to `false`,
    /// as in PyTorch. With `true`, `update` synchronizes if no `step` did. Corresponds to `raise_error_at_min_scale` in
    /// DeepSpeed, whose `min_scale` is 1.
    pub error_at_min_scale: bool,
    /// Whether fp16 gradients, which belong to fp16 parameters, may be unscaled. Unscaling in fp16 loses small values,
    /// which is why PyTorch refuses it. Defaults to `false`.
    pub allow_fp16_gradients: bool,
    /// Whether to warn on stderr, once for each scaler, if all of its first 20 iterations that had a step have skipped
    /// it, so that nothing was trained. Defaults to `true`. The option is not saved, and a loaded state does not count
    /// as a step. See [the page on common errors](crate::guide::errors).
    ///
    /// This never synchronizes. On a GPU it copies the outcome of the 20th iteration to the host, and the outcomes
    /// before it only if that was skipped; the warning comes when they have arrived. Once a graph is captured, the
    /// scaler no longer warns, because the host does not see what replays do. PyTorch does not warn.
    pub warn_of_skips: bool,
}

impl Default for GradScalerConfig {
    fn default() -> Self {
        Self {
            init_scale: 65536.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 2000,
            enabled: true,
            min_scale: SMALLEST,
            max_scale: LARGEST,
            hysteresis: 1,
            consecutive_hysteresis: true,
            tolerance: 0.0,
            max_consecutive_skips: None,
            error_at_min_scale: false,
            allow_fp16_gradients: false,
            warn_of_skips: true,
        }
    }
}

impl GradScalerConfig {
    pub(crate) fn check(&self) -> Result<()> {
        let (low, high) = (self.min_scale, self.max_scale);
        let (growth, backoff) = (self.growth_factor, self.backoff_factor);
        let hysteresis = self.hysteresis;
        let limit = self.max_consecutive_skips.unwrap_or(1);
        ensure("min_scale", low, SMALLEST <= low, "at least 2^-126")?;
        ensure("max_scale", high, high <= LARGEST, "at most the largest f32")?;
        ensure("max_scale", high, low <= high, "at least min_scale")?;
        self.check_scale("init_scale", self.init_scale)?;
        ensure("growth_factor", growth, 1.0 < growth && growth < INF, "finite and more than 1")?;
        ensure("backoff_factor", backoff, 0.0 < backoff && backoff < 1.0, "between 0 and 1")?;
        check_interval("growth_interval", self.growth_interval)?;
        ensure("hysteresis", f64::from(hysteresis), hysteresis > 0, "at least 1")?;
        let share = self.tolerance;
        ensure("tolerance", share, (0.0..=1.0).contains(&share), "from 0 to 1")?;
        ensure("max_consecutive_skips", f64::from(limit), limit > 0, "at least 1, or None")
    }

    /// The rule by which an iteration changes the scale.
    pub(crate) fn rule(&self) -> ScaleRule {
        ScaleRule {
            growth_factor: self.growth_factor,
            backoff_factor: self.backoff_factor,
            growth_interval: self.growth_interval,
            min_scale: self.min_scale,
            max_scale: self.max_scale,
            hysteresis: self.hysteresis.into(),
            tolerance: self.tolerance,
            consecutive: self.consecutive_hysteresis,
        }
    }

    /// Returns whether the scale may stay unchanged after an overflow.
    pub(crate) fn tolerates_overflows(&self) -> bool {
        self.hysteresis > 1 || self.tolerance > 0.0
    }

    /// Returns whether fp16 gradients may be unscaled. With a scale of 1 nothing is written back, so no small value is
    /// lost.
    pub(crate) fn may_unscale_fp16(&self) -> bool {
        self.allow_fp16_gradients || self.is_one()
    }

    /// Returns whether the scale is fixed at 1.
    pub(crate) fn is_one(&self) -> bool {
        self.min_scale == 1.0 && self.max_scale == 1.0
    }

    /// Refuses a scale outside the bounds, such as NaN. The scale and its bounds are compared as f32.
    pub(crate) fn check_scale(&self, field: &'static str, scale: f64) -> Result<()> {
        let bounds = self.min_scale as f32..=self.max_scale as f32;
        let inside = scale.is_finite() && bounds.contains(&(scale as f32));
        ensure(field, scale, inside, "a number from min_scale to max_scale")
    }
}

/// Refuses an interval beyond the range of the i32 tracker.
pub(crate) fn check_interval(name: &'static str, iterations: i64) -> Result<()> {
    let counts = (1..=i64::from(i32::MAX)).contains(&iterations);
    ensure(name, iterations as f64, counts, "from 1 to 2^31 - 1")
}

/// The value of a scale on the host. It repeats the arithmetic of libtorch's kernel, which saves transfers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct HostScale {
    pub(crate) scale: f32,
    pub(crate) tracker: i32,
    pub(crate) counts: OverflowCounts,
}

impl HostScale {
    /// The initial value of a scale.
    pub(crate) fn new(config: &GradScalerConfig) -> Self {
        let counts = OverflowCounts::new(config);
        Self { scale: config.init_scale as f32, tracker: 0, counts }
    }

    /// Returns whether an overflow should back the scale off while it is at its lower bound.
    pub(crate) fn is_stuck(self, rule: &ScaleRule) -> bool {
        self.scale <= rule.min_scale as f32 && !self.counts.count(true).tolerate(rule)
    }
}

/// Returns the scale after an iteration: the host's version of libtorch's kernel and of `csrc/scale/scale.cpp`.
///
/// The arithmetic is that of PyTorch's `_amp_update_scale_`, followed by the bounds: products in f64, rounded to f32.
/// An overflow multiplies the scale by the backoff factor, and `growth_interval` iterations without one multiply it by
/// the growth factor, unless the product is infinite. An overflow leaves the scale unchanged while the hysteresis, as
/// in Megatron-LM and DeepSpeed, is not used up, or while the share of overflows since the last change is below
/// `tolerance`, as in fairseq.
pub(crate) fn next(before: HostScale, overflow: bool, rule: &ScaleRule) -> HostScale {
    let times = |factor: f64| (f64::from(before.scale) * factor) as f32;
    let clamp = |scale: f32| scale.max(rule.min_scale as f32).min(rule.max_scale as f32);
    let counted = before.counts.count(overflow);
    if overflow && counted.tolerate(rule) {
        return HostScale { tracker: 0, counts: counted, ..before };
    }
    if overflow {
        let scale = clamp(times(rule.backoff_factor));
        return HostScale { scale, tracker: 0, counts: counted.restart(false, rule) };
    }
    let tracker = before.tracker + 1;
    if i64::from(tracker) < rule.growth_interval {
        let counts = counted.carry_on(rule);
        return HostScale { scale: clamp(before.scale), tracker, counts };
    }
    let grown = times(rule.growth_factor);
    let scale = clamp(if grown.is_finite() { grown } else { before.scale });
    HostScale { scale, tracker: 0, counts: counted.restart(true, rule) }
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

    /// Returns whether an overflow that has been counted leaves the scale unchanged.
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

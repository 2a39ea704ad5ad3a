//! The options of a scale that adapts, and the values that they may have.

use crate::builder::builder;
use crate::error::{Result, ensure};
use crate::ffi::ScaleRule;
use crate::scale::rule::{LARGEST, SMALLEST, check_interval};
#[cfg(doc)]
use crate::scaler::GradScaler;

const INF: f64 = f64::INFINITY;

/// How a [`GradScaler`] starts, grows, backs off and gives up. The defaults are PyTorch's.
///
/// ```
/// use tch::Device;
/// use tch_amp::scaler::GradScalerConfig;
///
/// let scaler = GradScalerConfig::default().growth_interval(100).build(Device::Cpu)?;
/// assert_eq!(scaler.get_growth_interval(), 100);
///
/// // DeepSpeed's defaults.
/// let deepspeed = GradScalerConfig::default().growth_interval(1000).hysteresis(2).consecutive_hysteresis(false).min_scale(1.0).error_at_min_scale(true);
/// let scaler = deepspeed.build(Device::Cpu)?;
/// # assert!(scaler.is_enabled());
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct GradScalerConfig {
    /// The first scale. Defaults to 65536.
    pub init_scale: f64,
    /// What the scale is multiplied by after `growth_interval` iterations in a row without overflow; more than 1.
    /// Defaults to 2.
    pub growth_factor: f64,
    /// What the scale is multiplied by when an iteration overflowed; between 0 and 1. Defaults to 0.5.
    pub backoff_factor: f64,
    /// Iterations without overflow before the scale grows; at least 1. Defaults to 2000.
    pub growth_interval: i64,
    /// Whether the scaler does anything. Defaults to `true`; see [`GradScaler::disabled`].
    pub enabled: bool,
    /// The scale never sinks below this; at least 2^-126, the default, below which 1/scale would overflow and turn
    /// finite gradients into NaN. PyTorch has no such bound.
    pub min_scale: f64,
    /// The scale never grows above this. Defaults to the largest f32, as in PyTorch. Equal to `min_scale` it makes the
    /// scale constant.
    pub max_scale: f64,
    /// Overflowing iterations that it takes for the scale to back off; further ones back it off, too. Defaults to 1, as
    /// in PyTorch. As `hysteresis` in Megatron-LM and DeepSpeed, which start with 2.
    pub hysteresis: u32,
    /// Whether an iteration without overflow restores the hysteresis, so that only overflows in a row count; with
    /// `false` only growth does. Defaults to `true`. As `consecutive_hysteresis` in DeepSpeed, where `false` is the
    /// default; Megatron-LM does as with `false`.
    pub consecutive_hysteresis: bool,
    /// The scale does not back off while the share of overflowing iterations is below this; from 0 to 1. Counted since
    /// it last backed off or could grow. Defaults to 0: every overflow counts. As `tolerance` in fairseq, which goes on
    /// counting the overflows from before a growth.
    pub tolerance: f64,
    /// Overflowing iterations in a row at which `update` becomes an error. Defaults to `None`: never, as in PyTorch.
    /// A limit makes `update` wait for the device where no `step` did.
    pub max_consecutive_skips: Option<u32>,
    /// Whether `update` becomes an error when an overflow should back the scale off and it is at `min_scale` already.
    /// Set `min_scale`, too: 2^-126, its default, is some 140 overflows away. Defaults to `false`, as in PyTorch. `true`
    /// makes `update` wait for the device where no `step` did. As
    /// `raise_error_at_min_scale` in DeepSpeed, whose `min_scale` is 1.
    pub error_at_min_scale: bool,
    /// Whether fp16 gradients may be unscaled; they come from fp16 parameters and lose small values, which is why
    /// PyTorch refuses them. Defaults to `false`.
    pub allow_fp16_gradients: bool,
}

builder!(GradScalerConfig { init_scale: f64, growth_factor: f64, backoff_factor: f64, growth_interval: i64, enabled: bool, min_scale: f64, max_scale: f64, hysteresis: u32, consecutive_hysteresis: bool, tolerance: f64, max_consecutive_skips: Option<u32>, error_at_min_scale: bool, allow_fp16_gradients: bool });

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

    /// How an iteration changes the scale.
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

    /// Whether the scale may stay as it is after an overflow.
    pub(crate) fn tolerates_overflows(&self) -> bool {
        self.hysteresis > 1 || self.tolerance > 0.0
    }

    /// Whether fp16 gradients may be unscaled. A scale of one writes nothing back, so that no small value is lost.
    pub(crate) fn may_unscale_fp16(&self) -> bool {
        self.allow_fp16_gradients || self.is_one()
    }

    /// Whether the scale is one and stays so.
    pub(crate) fn is_one(&self) -> bool {
        self.min_scale == 1.0 && self.max_scale == 1.0
    }

    /// Refuses a scale that is not between the bounds; NaN is not. The scale and its bounds are f32 where they meet.
    pub(crate) fn check_scale(&self, field: &'static str, scale: f64) -> Result<()> {
        let bounds = self.min_scale as f32..=self.max_scale as f32;
        let inside = scale.is_finite() && bounds.contains(&(scale as f32));
        ensure(field, scale, inside, "a number from min_scale to max_scale")
    }
}

//! The adaptive loss scale, its state, and the conversions between that and the state of a gradient scaler.

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::capture;
use crate::device::check_usable;
use crate::error::{Error, Result, ScalerError, ensure};
use crate::ffi::{OutsideRegions, ScaleRule};
use crate::loss_scale::finite::{GRADS_FINITE, flag};
use crate::loss_scale::{LossScale, LossScaleState};
use crate::scale::{
    GradScalerConfig, GradScalerState, HostScale, LARGEST, SMALLEST, ScaleTensor, Trackers,
    check_interval, required,
};

/// Multiplies the scale by `factor` after `period` consecutive finite adjustments and divides it by `factor` when
/// gradients are not finite. The counterpart of `jmp.DynamicLossScale`, with its defaults:
///
/// ```text
/// loss_scale = 2^15, counter = 0, period = 2000, factor = 2, min_loss_scale = 1
///
/// adjust(grads_finite):
///     if grads_finite:
///         counter += 1
///         if counter == period:
///             counter = 0
///             if loss_scale * factor is finite: loss_scale *= factor
///     else:
///         counter = 0
///         loss_scale = max(min_loss_scale, loss_scale / factor)
/// ```
///
/// Products are computed in f64 and rounded to f32 once, as in PyTorch's scaler; jmp multiplies f32s. For a factor that
/// is exact in f32, such as 2 or 3, the results are the same; for others, such as 1.1, the last bits can differ.
///
/// A [`GradScaler`](crate::GradScaler) with `growth_factor = factor`, `backoff_factor = 1 / factor` and
/// `growth_interval = period` behaves in the same way and runs the same kernel. Each can be made from the other's
/// state:
///
/// ```
/// use tch::Device;
/// use tch_amp::loss_scale::DynamicLossScaleState;
/// use tch_amp::GradScaler;
/// use tch_amp::scaler::GradScalerState;
///
/// let mut scaler = GradScaler::new(Device::Cpu)?;
/// let state = DynamicLossScaleState::try_from(&scaler.state_dict()?)?;
/// assert_eq!((state.loss_scale, state.period), (65536.0, 2000));
/// let loss_scale = state.build(Device::Cpu)?;
///
/// scaler.load_state_dict(&GradScalerState::from(&loss_scale.state()?))?;
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Debug)]
pub struct DynamicLossScale {
    number: ScaleTensor,
    rule: ScaleRule,
}

impl DynamicLossScale {
    /// Makes a loss scale with jmp's defaults on `device`, which should be the device of the loss. For other options
    /// use [`DynamicLossScaleState`].
    ///
    /// # Errors
    ///
    /// [`Error::DeviceUnavailable`], with the reason, if the device cannot be used here.
    pub fn new(device: Device) -> Result<Self> {
        DynamicLossScaleState::default().build(device)
    }

    pub(super) fn from_state(device: Device, state: DynamicLossScaleState) -> Result<Self> {
        let (config, value) = state.checked()?.adaptive();
        check_usable(device)?;
        let number = ScaleTensor::new(device, value, false, false)?;
        Ok(Self { number, rule: config.rule() })
    }

    /// Returns the complete state. Synchronizes once after each adjustment. [`state_dict`](LossScale::state_dict) is
    /// the equivalent for any loss scale.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if the device cannot be read.
    pub fn state(&self) -> Result<DynamicLossScaleState> {
        // Destructured exhaustively, so that a new field does not compile until it is saved.
        let Self { number, rule } = self;
        let HostScale { scale, tracker, counts: _ } = number.value()?;
        Ok(DynamicLossScaleState {
            loss_scale: scale.into(),
            counter: tracker.into(),
            period: rule.growth_interval,
            factor: rule.growth_factor,
            min_loss_scale: rule.min_scale,
        })
    }
}

impl Clone for DynamicLossScale {
    /// Copies the loss scale. Adjusting one of the two does not change the other.
    fn clone(&self) -> Self {
        Self { number: self.number.shallow_clone(), rule: self.rule }
    }
}

impl LossScale for DynamicLossScale {
    fn loss_scale(&self) -> Option<&Tensor> {
        Some(self.number.tensor())
    }

    fn adjust(&mut self, grads_finite: &Tensor) -> Result<()> {
        capture::refuse("adjusting a loss scale, which makes a new one", "use a `GradScaler`")?;
        let _own = OutsideRegions::enter();
        let found_inf = flag(GRADS_FINITE, grads_finite)?.f_logical_not()?;
        let found_inf = found_inf.f_to_kind(Kind::Float)?;
        // A new number, since graphs, clones and callers hold the old tensors.
        self.number = self.number.changed(&found_inf, self.rule)?;
        Ok(())
    }

    fn value(&self) -> Result<f64> {
        Ok(self.number.value()?.scale.into())
    }

    fn state_dict(&self) -> Result<LossScaleState> {
        self.state().map(LossScaleState::Dynamic)
    }

    fn load_state_dict(&mut self, state: &LossScaleState) -> Result<()> {
        let LossScaleState::Dynamic(state) = *state else {
            return Err(state.is_not("Dynamic"));
        };
        *self = Self::from_state(self.number.tensor().device(), state)?;
        Ok(())
    }
}

/// The options and the complete state of a [`DynamicLossScale`]. The defaults are jmp's, with the initial scale of
/// jmp's documentation.
///
/// Unlike this state, jmp's pytree of a loss scale does not include `min_loss_scale`, which is reset to its default
/// when the pytree is flattened and unflattened.
///
/// # Examples
///
/// ```
/// use tch::Device;
/// use tch_amp::loss_scale::DynamicLossScaleState;
///
/// let loss_scale = DynamicLossScaleState { period: 500, ..Default::default() }.build(Device::Cpu)?;
/// assert_eq!(loss_scale.state()?.loss_scale, 32768.0);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DynamicLossScaleState {
    /// The scale. Defaults to 2^15.
    pub loss_scale: f64,
    /// Number of consecutive finite adjustments since the scale last changed or could grow. Defaults to 0.
    pub counter: i64,
    /// Number of consecutive finite adjustments after which the scale grows; at least 1. Defaults to 2000.
    pub period: i64,
    /// Factor by which the scale is multiplied when it grows, and divided when gradients are not finite; more than 1.
    /// Defaults to 2.
    pub factor: f64,
    /// Lower bound of the scale, rounded to f32; at least 2^-126. Defaults to 1.
    pub min_loss_scale: f64,
}

impl Default for DynamicLossScaleState {
    fn default() -> Self {
        Self { loss_scale: 32768.0, counter: 0, period: 2000, factor: 2.0, min_loss_scale: 1.0 }
    }
}

impl DynamicLossScaleState {
    /// Makes the loss scale on `device`, which should be the device of the loss.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for a field outside its range; [`Error::DeviceUnavailable`], with the reason, if the
    /// device cannot be used here.
    pub fn build(self, device: Device) -> Result<DynamicLossScale> {
        DynamicLossScale::from_state(device, self)
    }

    /// Returns the state, with its counter clamped to less than the period, or an error for an invalid state.
    pub(super) fn checked(self) -> Result<Self> {
        let Self { loss_scale, counter, period, factor, min_loss_scale: min } = self;
        check_interval("period", period)?;
        let counts = (0..=i64::from(i32::MAX)).contains(&counter);
        ensure("counter", counter as f64, counts, "from 0 to 2^31 - 1")?;
        let grows = 1.0 < factor && factor < f64::INFINITY;
        ensure("factor", factor, grows, "finite and more than 1")?;
        let rule = "a number from 2^-126 to the largest f32";
        ensure("min_loss_scale", min, (SMALLEST..=LARGEST).contains(&min), rule)?;
        let rule = "a number from min_loss_scale to the largest f32";
        // Compared as f32: a scale that sank to the bound equals the rounded bound, which may be below the f64 one.
        let holds = loss_scale as f32 >= min as f32 && loss_scale <= LARGEST;
        ensure("loss_scale", loss_scale, holds, rule)?;
        Ok(Self { counter: counter.min(period - 1), ..self })
    }

    /// Returns the options of a scaler that chooses its scales in the same way, and the value of its scale.
    fn adaptive(self) -> (GradScalerConfig, HostScale) {
        // Destructured exhaustively, so that a new field does not compile until it is carried over.
        let Self { loss_scale, counter, period, factor, min_loss_scale } = self;
        let config = GradScalerConfig {
            init_scale: loss_scale,
            growth_factor: factor,
            backoff_factor: 1.0 / factor,
            growth_interval: period,
            min_scale: min_loss_scale,
            ..Default::default()
        };
        (config, HostScale { tracker: counter as i32, ..HostScale::new(&config) })
    }
}

impl From<&DynamicLossScaleState> for GradScalerState {
    /// Returns a state with which any [`GradScaler`](crate::GradScaler) chooses its scales in the same way. Options
    /// without a counterpart in a loss scale are set to the values that disable them, except for
    /// `max_consecutive_skips` and `allow_fp16_gradients`, which do not affect the scale: the loading scaler keeps its
    /// own. PyTorch ignores the keys that it does not have, including the lower bound.
    fn from(state: &DynamicLossScaleState) -> Self {
        let (config, mirror) = state.adaptive();
        Self {
            growth_tracker: Some(state.counter),
            // Rounded to f32, in which both compute: a scale at its lower bound must be at the bound for a scaler, too.
            min_scale: Some((config.min_scale as f32).into()),
            max_scale: Some(config.max_scale),
            hysteresis: Some(config.hysteresis),
            tolerance: Some(config.tolerance),
            error_at_min_scale: Some(config.error_at_min_scale),
            ..Self::save(&config, Trackers { mirror, skips: 0 })
        }
    }
}

impl TryFrom<&GradScalerState> for DynamicLossScaleState {
    type Error = Error;

    /// Returns the state of a [`DynamicLossScale`](crate::loss_scale::DynamicLossScale) that behaves in the same way. A
    /// state without a lower bound gets a scaler's default, 2^-126, not jmp's.
    ///
    /// # Errors
    ///
    /// [`ScalerError::EmptyState`] and [`ScalerError::MissingKey`] for a state that no enabled scaler saved;
    /// [`Error::InvalidArgument`] for options that a dynamic loss scale does not have, namely a `backoff_factor` other
    /// than 1/`growth_factor`, a `max_scale`, a `hysteresis`, a `tolerance`, `max_consecutive_skips` or
    /// `error_at_min_scale`, and for values outside their range.
    fn try_from(state: &GradScalerState) -> Result<Self> {
        if *state == GradScalerState::default() {
            return Err(Error::Scaler(ScalerError::EmptyState));
        }
        // Destructured exhaustively, so that a new option does not compile until it is carried over or refused.
        let GradScalerState {
            scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            growth_tracker,
            min_scale,
            max_scale,
            hysteresis,
            // Has no effect without a hysteresis.
            consecutive_hysteresis: _,
            tolerance,
            max_consecutive_skips,
            error_at_min_scale,
            // Concerns unscaling by a scaler; a loss scale accepts all gradients.
            allow_fp16_gradients: _,
            // Counts of the options that are refused.
            consecutive_skips: _,
            hysteresis_tracker: _,
            iterations_since_rescale: _,
            overflows_since_rescale: _,
        } = *state;
        let factor = required("growth_factor", growth_factor)?;
        check_backoff(required("backoff_factor", backoff_factor)?, factor)?;
        let top = max_scale.unwrap_or(LARGEST);
        absent("max_scale", top, top >= LARGEST)?;
        let overflows = f64::from(hysteresis.unwrap_or(1));
        absent("hysteresis", overflows, overflows == 1.0)?;
        let share = tolerance.unwrap_or(0.0);
        absent("tolerance", share, share == 0.0)?;
        let raises = error_at_min_scale.unwrap_or(false);
        absent("error_at_min_scale", raises.into(), !raises)?;
        let limit = max_consecutive_skips;
        absent("max_consecutive_skips", limit.map_or(0.0, f64::from), limit.is_none())?;
        Self {
            loss_scale: required("scale", scale)?,
            counter: required("_growth_tracker", growth_tracker)?,
            period: required("growth_interval", growth_interval)?,
            factor,
            min_loss_scale: min_scale.unwrap_or(SMALLEST),
        }
        .checked()
    }
}

fn check_backoff(backoff: f64, factor: f64) -> Result<()> {
    let rule = "1/growth_factor: a dynamic loss scale has one factor";
    // 1/growth_factor may be rounded, or either may have been typed in.
    ensure("backoff_factor", backoff, (backoff * factor - 1.0).abs() < 1e-6, rule)
}

/// Refuses an option that would be lost.
fn absent(field: &'static str, value: f64, holds: bool) -> Result<()> {
    ensure(field, value, holds, "left at its default: a dynamic loss scale has no such option")
}

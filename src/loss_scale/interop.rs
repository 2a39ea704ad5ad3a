//! Conversions between the states of dynamic loss scales and gradient scalers.

use crate::error::{Error, Result, ScalerError, ensure};
use crate::loss_scale::DynamicLossScaleState;
use crate::scale::{GradScalerState, LARGEST, SMALLEST, required};

impl From<&DynamicLossScaleState> for GradScalerState {
    /// Returns a state with which any [`GradScaler`](crate::GradScaler) chooses its scales in the same way. Options
    /// without a counterpart in a loss scale are set to the values that disable them, except for
    /// `max_consecutive_skips` and `allow_fp16_gradients`, which do not affect the scale: the loading scaler keeps its
    /// own. PyTorch ignores the keys that it does not have, including the lower bound.
    fn from(state: &DynamicLossScaleState) -> Self {
        // Destructured exhaustively, so that a new field does not compile until it is carried over.
        let DynamicLossScaleState { loss_scale, counter, period, factor, min_loss_scale } = *state;
        Self {
            // Rounded to f32, in which both compute: a scale at its lower bound must be at the bound for a scaler, too.
            scale: Some((loss_scale as f32).into()),
            growth_factor: Some(factor),
            backoff_factor: Some(1.0 / factor),
            growth_interval: Some(period),
            growth_tracker: Some(counter),
            min_scale: Some((min_loss_scale as f32).into()),
            max_scale: Some(LARGEST),
            hysteresis: Some(1),
            tolerance: Some(0.0),
            error_at_min_scale: Some(false),
            ..Self::default()
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

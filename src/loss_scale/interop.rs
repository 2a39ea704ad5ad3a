//! Dynamic loss scales and gradient scalers from each other's states.

#![forbid(unsafe_code)]

use crate::error::{Error, Result, ensure};
use crate::loss_scale::DynamicLossScaleState;
use crate::loss_scale::fixed::{LARGEST, SMALLEST};
use crate::scaler::GradScalerState;

impl From<&DynamicLossScaleState> for GradScalerState {
    /// The state of a [`GradScaler`](crate::GradScaler) that does the same. PyTorch, which has no lower bound, ignores
    /// that one.
    fn from(state: &DynamicLossScaleState) -> Self {
        // Whole, so that a new field does not compile until it is carried over.
        let DynamicLossScaleState { loss_scale, counter, period, factor, min_loss_scale } = *state;
        Self {
            scale: Some(loss_scale),
            growth_factor: Some(factor),
            backoff_factor: Some(1.0 / factor),
            growth_interval: Some(period),
            growth_tracker: Some(counter),
            min_scale: Some(min_loss_scale),
            ..Self::default()
        }
    }
}

impl TryFrom<&GradScalerState> for DynamicLossScaleState {
    type Error = Error;

    /// The state of a [`DynamicLossScale`](crate::DynamicLossScale) that does the same. A state without a lower bound
    /// gives a scaler's, 2^-126, and not jmp's.
    ///
    /// # Errors
    ///
    /// [`Error::EmptyState`] and [`Error::MissingKey`] for a state that no enabled scaler saved;
    /// [`Error::InvalidValue`] for what a dynamic loss scale does not have: a `backoff_factor` other than
    /// 1/`growth_factor`, a `max_scale`, a `hysteresis`, a `tolerance` or an option that gives up; and for values outside
    /// their range.
    fn try_from(state: &GradScalerState) -> Result<Self> {
        if *state == GradScalerState::default() {
            return Err(Error::EmptyState);
        }
        let factor = required("growth_factor", state.growth_factor)?;
        refuse_more(state, factor)?;
        let loss_scale = required("scale", state.scale)?;
        Self {
            loss_scale,
            counter: required("_growth_tracker", state.growth_tracker)?,
            period: required("growth_interval", state.growth_interval)?,
            factor,
            min_loss_scale: state.min_scale.unwrap_or(SMALLEST),
        }
        .checked()
    }
}

/// Refuses options that would be lost.
fn refuse_more(state: &GradScalerState, factor: f64) -> Result<()> {
    let backoff = required("backoff_factor", state.backoff_factor)?;
    let rule = "1/growth_factor: a dynamic loss scale has one factor";
    // The quotient of the one may be rounded where the other was typed in.
    ensure("backoff_factor", backoff, (backoff * factor - 1.0).abs() < 1e-6, rule)?;
    let top = state.max_scale.unwrap_or(LARGEST);
    ensure("max_scale", top, top >= LARGEST, "absent: a dynamic loss scale has none")?;
    let rule = "absent: a dynamic loss scale has none";
    let in_a_row = f64::from(state.hysteresis.unwrap_or(1));
    ensure("hysteresis", in_a_row, in_a_row == 1.0, rule)?;
    let share = state.tolerance.unwrap_or(0.0);
    ensure("tolerance", share, share == 0.0, rule)?;
    let raises = state.error_at_min_scale == Some(true);
    ensure("error_at_min_scale", raises.into(), !raises, rule)?;
    let limit = state.max_consecutive_skips;
    ensure("max_consecutive_skips", limit.map_or(0.0, f64::from), limit.is_none(), rule)
}

fn required<T>(key: &'static str, value: Option<T>) -> Result<T> {
    value.ok_or(Error::MissingKey { key })
}

//! Ending an iteration.

#![forbid(unsafe_code)]

use tch::Tensor;

use crate::error::{Error, Result};
use crate::ffi;
use crate::scaler::scale::Scale;
use crate::scaler::{GradScaler, GradScalerConfig};

impl GradScaler {
    /// Ends the iteration: backs the scale off if any optimizer's gradients overflowed, or counts towards its growth.
    ///
    /// Waits for the device only with `error_at_min_scale` or `max_consecutive_skips` where an overflow is known on a GPU
    /// only, as that of a fused optimizer is, or where the scale is on the CPU and the overflow is not.
    ///
    /// # Errors
    ///
    /// [`Error::NoInfChecks`] when no gradient was checked since the last update; nothing changes then.
    /// [`Error::TooManySkips`] at the configured limit, and [`Error::ScaleAtMinimum`] with `error_at_min_scale`; the
    /// iteration has been ended as usual then.
    pub fn update(&mut self) -> Result<()> {
        self.check_whole("update")?;
        let Some(scale) = &mut self.scale else {
            return Ok(());
        };
        let iteration = self.iteration.get_mut();
        let (found_infs, overflow) = iteration.found_infs();
        let given_up = end(scale, &self.config, &mut self.skips, &found_infs, overflow)?;
        iteration.close();
        given_up.map_or(Ok(()), Err)
    }

    /// Ends the iteration with a given scale. The growth tracker and the count of skips stay. Does not wait for the
    /// device. As `update(new_scale)` with a number.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidValue`] unless `new_scale` is from `min_scale` to `max_scale`; nothing changes then.
    pub fn update_with(&mut self, new_scale: f64) -> Result<()> {
        self.check_whole("update, and load_state_dict for another scale,")?;
        let Some(scale) = &mut self.scale else {
            return Ok(());
        };
        self.config.check_scale("new_scale", new_scale)?;
        scale.set_scale(new_scale as f32)?;
        self.iteration.get_mut().close();
        Ok(())
    }

    /// Ends the iteration with the scale in a one-element tensor. Waits for the tensor's device, because a scale that
    /// is not finite must not get through. As `update(new_scale)` with a tensor.
    ///
    /// # Errors
    ///
    /// As [`update_with`](Self::update_with), also for a tensor that has not one element; [`Error::Torch`] for an
    /// undefined one.
    pub fn update_with_tensor(&mut self, new_scale: &Tensor) -> Result<()> {
        let value = new_scale.f_view(-1)?.f_detach()?;
        if value.numel() != 1 {
            let (field, value) = ("the number of elements of new_scale", value.numel() as f64);
            return Err(Error::InvalidValue { field, value, rule: "1" });
        }
        self.update_with(value.f_double_value(&[0])?)
    }
}

/// Ends the iteration of a scale, and returns the error to tell once that is closed. After an error of its own nothing
/// has changed.
pub(super) fn end(
    scale: &mut Scale,
    config: &GradScalerConfig,
    skips: &mut u32,
    found_infs: &[&Tensor],
    mut overflow: Option<bool>,
) -> Result<Option<Error>> {
    if found_infs.is_empty() {
        return Err(Error::NoInfChecks);
    }
    let gives_up = config.max_consecutive_skips.is_some() || config.error_at_min_scale;
    if overflow.is_none() && gives_up {
        overflow = Some(ffi::any_nonzero(found_infs)?);
    }
    let rule = config.rule();
    let asks = config.error_at_min_scale && overflow == Some(true);
    let stuck = asks && scale.value()?.is_stuck(&rule);
    scale.update(found_infs, overflow, &rule)?;
    *skips = if overflow == Some(true) { skips.saturating_add(1) } else { 0 };
    let limit = config.max_consecutive_skips.filter(|limit| *skips >= *limit);
    if limit.is_none() && !stuck {
        return Ok(None);
    }
    // The host knows it: it knew of the overflow.
    let (skips, scale) = (*skips, scale.value()?.scale.into());
    Ok(Some(match limit {
        Some(limit) => Error::TooManySkips { skips, limit, scale },
        None => Error::ScaleAtMinimum { scale },
    }))
}

//! Ending an iteration.

use tch::Tensor;

#[cfg(doc)]
use crate::error::ScalerError;
use crate::error::{Error, Result};
use crate::scale::end_all;
use crate::scaler::GradScaler;

impl GradScaler {
    /// Ends the iteration: backs the scale off if any optimizer's gradients overflowed, or counts towards its growth.
    ///
    /// The scale stays as it is where unscaling broke off and nothing else was checked.
    ///
    /// Waits for the device only with `error_at_min_scale` or `max_consecutive_skips` where an overflow is known on a GPU
    /// only, as that of a fused optimizer is, or where the scale is on the CPU and the overflow is not.
    ///
    /// # Errors
    ///
    /// [`ScalerError::NoInfChecks`] when no gradient was checked since the last update, and [`ScalerError::UnscaleFailed`] when
    /// unscaling broke off and the gradients were not zeroed since; nothing changes then.
    /// [`ScalerError::TooManySkips`] at the configured limit, and [`ScalerError::ScaleAtMinimum`] with `error_at_min_scale`; the
    /// iteration has been ended as usual then.
    pub fn update(&mut self) -> Result<()> {
        if !self.is_enabled() {
            return Ok(());
        }
        let iteration = self.iteration.get_mut();
        let is_broken = iteration.check_broken()?;
        let given_up = if is_broken && iteration.found().next().is_none() {
            None
        } else {
            let end = self.scale.end(iteration.found())?;
            end_all(&mut Vec::from_iter(end))?
        };
        iteration.close();
        given_up.map_or(Ok(()), Err)
    }

    /// Ends the iteration with a given scale. The growth tracker and the count of skips stay. Does not wait for the
    /// device. As `update(new_scale)` with a number.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] unless `new_scale` is from `min_scale` to `max_scale`; nothing changes then.
    pub fn update_with(&mut self, new_scale: f64) -> Result<()> {
        self.scale.set_scale(new_scale)?;
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
            return Err(Error::out_of_range(field, value, "1"));
        }
        self.update_with(value.f_double_value(&[0])?)
    }
}

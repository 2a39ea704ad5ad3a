//! Ending an iteration.

use tch::Tensor;

use crate::error::{Error, Result};
#[cfg(doc)]
use crate::error::{GradientError, ScalerError};
use crate::ffi::{self, OutsideRegions};
use crate::scale::end_all;
use crate::scaler::GradScaler;

impl GradScaler {
    /// Ends the iteration: backs the scale off if the gradients of any optimizer overflowed, and otherwise counts the
    /// iteration towards growth. The counterpart of `update`.
    ///
    /// The scale does not change if unscaling broke off and nothing else was checked.
    ///
    /// Synchronizes only where the host has not read whether an iteration overflowed, because the optimizer was fused
    /// or not stepped, and either `error_at_min_scale` or `max_consecutive_skips` is set, or the scale is on the CPU
    /// and the gradients are on a GPU.
    ///
    /// # Errors
    ///
    /// [`ScalerError::NoInfChecks`] if no gradient was checked since the last update, and
    /// [`ScalerError::UnscaleFailed`] if unscaling broke off and the gradients were not zeroed since;
    /// [`GradientError::Unsynced`] while a model on several ranks accumulates gradients that were scaled; nothing is
    /// changed then. [`ScalerError::TooManySkips`] at the configured limit, and [`ScalerError::ScaleAtMinimum`] with
    /// `error_at_min_scale`; the iteration has been ended as usual then.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Tensor};
    /// use tch_amp::optim::Sgd;
    /// use tch_amp::scaler::GradScalerConfig;
    ///
    /// # let w = Tensor::from_slice(&[1f32]).set_requires_grad(true);
    /// # let mut opt = Sgd::default().build(&[w.shallow_clone()], 0.1)?;
    /// let mut scaler = GradScalerConfig::default().init_scale(4.0).growth_interval(2).build(Device::Cpu)?;
    /// let mut scales = Vec::new();
    /// for gradient in [1.0, 1.0, f64::INFINITY] {
    ///     opt.zero_grad()?;
    ///     scaler.backward(&(&w * gradient).sum(None))?;
    ///     let _outcome = scaler.step(&mut opt)?;
    ///     scaler.update()?;
    ///     scales.push(scaler.get_scale()?);
    /// }
    /// assert_eq!(scales, [4.0, 8.0, 4.0]);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn update(&mut self) -> Result<()> {
        if !self.scale.is_enabled() {
            self.iteration.get_mut().close();
            return Ok(());
        }
        self.check_scale_may_change()?;
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

    /// Ends the iteration and sets the scale to a given value. The growth tracker and the count of skips do not change.
    /// Does not synchronize. Corresponds to `update(new_scale)` with a number in PyTorch.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] unless `new_scale` is from `min_scale` to `max_scale`; [`GradientError::Unsynced`] as
    /// in [`update`](Self::update). Nothing is changed then.
    pub fn update_with(&mut self, new_scale: f64) -> Result<()> {
        self.check_scale_may_change()?;
        self.scale.set_scale(new_scale)?;
        self.iteration.get_mut().close();
        Ok(())
    }

    /// Ends the iteration and sets the scale to the value of a one-element tensor. Synchronizes with the tensor's
    /// device, because a non-finite scale has to be refused. Corresponds to `update(new_scale)` with a tensor in
    /// PyTorch.
    ///
    /// # Errors
    ///
    /// The same as [`update_with`](Self::update_with), also for a tensor that does not have exactly one element;
    /// [`Error::Torch`] for an undefined one.
    pub fn update_with_tensor(&mut self, new_scale: &Tensor) -> Result<()> {
        let _own = OutsideRegions::enter();
        let value = new_scale.f_view(-1)?.f_detach()?;
        let elements = ffi::numel(&value);
        if elements != 1 {
            let (field, value) = ("the number of elements of new_scale", elements as f64);
            return Err(Error::out_of_range(field, value, "1"));
        }
        self.update_with(value.f_double_value(&[0])?)
    }
}

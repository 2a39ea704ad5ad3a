//! Getters and setters of a scaler, and its state.

#[cfg(doc)]
use crate::error::Error;
use crate::error::{Result, ScalerError};
use crate::scale::LoadedState;
use crate::scaler::{GradScaler, GradScalerState};

impl GradScaler {
    /// Returns the factor by which the scale is multiplied when it grows.
    pub fn get_growth_factor(&self) -> f64 {
        self.scale.config().growth_factor
    }

    /// Sets the factor by which the scale is multiplied when it grows.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] unless it is finite and more than 1; the old value is kept then.
    pub fn set_growth_factor(&mut self, growth_factor: f64) -> Result<()> {
        self.scale.set_growth_factor(growth_factor)
    }

    /// Returns the factor by which the scale is multiplied when it backs off.
    pub fn get_backoff_factor(&self) -> f64 {
        self.scale.config().backoff_factor
    }

    /// Sets the factor by which the scale is multiplied when it backs off.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] unless it is between 0 and 1; the old value is kept then.
    pub fn set_backoff_factor(&mut self, backoff_factor: f64) -> Result<()> {
        self.scale.set_backoff_factor(backoff_factor)
    }

    /// Returns the number of consecutive iterations without overflow after which the scale grows.
    pub fn get_growth_interval(&self) -> i64 {
        self.scale.config().growth_interval
    }

    /// Sets the number of consecutive iterations without overflow after which the scale grows. If that many are already
    /// counted, the scale grows after the next one; in PyTorch it does not grow until an overflow has reset the count.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] unless it is from 1 to 2^31 - 1; the old value is kept then.
    pub fn set_growth_interval(&mut self, growth_interval: i64) -> Result<()> {
        self.scale.set_growth_interval(growth_interval)
    }

    /// Returns the state to save; it is empty for a disabled scaler. Synchronizes like [`get_scale`](Self::get_scale).
    ///
    /// # Errors
    ///
    /// [`ScalerError::IterationOpen`] between `unscale_` or `step` and `update`, when a part of the state is in the
    /// gradients; [`Error::Torch`] if the device cannot be read.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Tensor};
    /// use tch_amp::GradScaler;
    /// use tch_amp::optim::Sgd;
    ///
    /// # let w = Tensor::from_slice(&[1f32]).set_requires_grad(true);
    /// # let mut opt = Sgd::default().build(&[w.shallow_clone()], 0.1)?;
    /// let mut scaler = GradScaler::new(Device::Cpu)?;
    /// scaler.backward(&w.sum(None))?;
    /// let _outcome = scaler.step(&mut opt)?;
    /// assert!(scaler.state_dict().is_err());
    /// scaler.update()?;
    /// assert_eq!(scaler.state_dict()?.growth_tracker, Some(1));
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn state_dict(&self) -> Result<GradScalerState> {
        self.check_closed("state_dict")?;
        self.scale.state_dict()
    }

    /// Loads a saved state. A disabled scaler ignores it.
    ///
    /// # Errors
    ///
    /// [`ScalerError::EmptyState`], [`ScalerError::MissingKey`] and [`Error::InvalidArgument`] for a state that no
    /// scaler can have saved; [`ScalerError::IterationOpen`] between `unscale_` or `step` and `update`. Nothing is
    /// changed then.
    pub fn load_state_dict(&mut self, state: &GradScalerState) -> Result<()> {
        match self.prepare_state(state)? {
            Some(loaded) => self.set_state(loaded),
            None => Ok(()),
        }
    }

    /// Checks a state and allocates what loading it needs; `None` for a disabled scaler, which loads nothing.
    pub(crate) fn prepare_state(&self, state: &GradScalerState) -> Result<Option<LoadedState>> {
        self.check_closed("load_state_dict")?;
        self.scale.prepare_state(state)
    }

    pub(crate) fn set_state(&mut self, loaded: LoadedState) -> Result<()> {
        self.scale.set_state(loaded)
    }

    fn check_closed(&self, call: &'static str) -> Result<()> {
        if self.iteration.borrow().is_open() {
            return Err(ScalerError::IterationOpen { call }.into());
        }
        Ok(())
    }
}

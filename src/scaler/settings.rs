//! The settings and the state of a scaler at work.

#[cfg(doc)]
use crate::error::Error;
use crate::error::{Result, ScalerError};
use crate::scale::LoadedState;
use crate::scaler::{GradScaler, GradScalerState};

impl GradScaler {
    /// Returns what the scale is multiplied by when it grows.
    pub fn get_growth_factor(&self) -> f64 {
        self.scale.config().growth_factor
    }

    /// Sets what the scale is multiplied by when it grows.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] unless it is finite and more than 1; the old value stays then.
    pub fn set_growth_factor(&mut self, growth_factor: f64) -> Result<()> {
        self.scale.set_growth_factor(growth_factor)
    }

    /// Returns what the scale is multiplied by when it backs off.
    pub fn get_backoff_factor(&self) -> f64 {
        self.scale.config().backoff_factor
    }

    /// Sets what the scale is multiplied by when it backs off.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] unless it is between 0 and 1; the old value stays then.
    pub fn set_backoff_factor(&mut self, backoff_factor: f64) -> Result<()> {
        self.scale.set_backoff_factor(backoff_factor)
    }

    /// Returns the number of iterations without overflow before the scale grows.
    pub fn get_growth_interval(&self) -> i64 {
        self.scale.config().growth_interval
    }

    /// Sets the number of iterations without overflow before the scale grows. With more than that behind it already,
    /// the scale grows at the next one; in PyTorch it would never grow again.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] unless it is from 1 to 2^31 - 1; the old value stays then.
    pub fn set_growth_interval(&mut self, growth_interval: i64) -> Result<()> {
        self.scale.set_growth_interval(growth_interval)
    }

    /// Returns the state to save: the empty one for a disabled scaler. Waits as [`get_scale`](Self::get_scale).
    ///
    /// # Errors
    ///
    /// [`ScalerError::IterationOpen`] between `unscale_` or `step` and `update`, where a part of the state is in the
    /// gradients.
    pub fn state_dict(&self) -> Result<GradScalerState> {
        self.check_closed("state_dict")?;
        self.scale.state_dict()
    }

    /// Takes over a saved state. Nothing happens to a disabled scaler.
    ///
    /// # Errors
    ///
    /// [`ScalerError::EmptyState`], [`ScalerError::MissingKey`] and [`Error::InvalidArgument`] for a state that no scaler
    /// can have saved, and [`ScalerError::IterationOpen`]; nothing changes then.
    pub fn load_state_dict(&mut self, state: &GradScalerState) -> Result<()> {
        match self.prepare_state(state)? {
            Some(loaded) => self.set_state(loaded),
            None => Ok(()),
        }
    }

    /// Checks a state and makes what loading it takes; `None` for a disabled scaler, which loads nothing.
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

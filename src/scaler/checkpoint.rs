//! Scalers in a checkpoint.

use crate::checkpoint::{Checkpoint, Prepared, Restore, SaveState, SavedState, Stateful};
use crate::error::Result;
#[cfg(doc)]
use crate::error::ScalerError;
use crate::scaler::{GradScaler, PerLossScalers};

impl Checkpoint {
    /// Adds the state of a scaler. Synchronizes like [`GradScaler::state_dict`].
    ///
    /// # Errors
    ///
    /// See [`add`](Self::add); and [`ScalerError::IterationOpen`] between `unscale_` or `step` and
    /// `update`.
    pub fn add_scaler(&mut self, name: &str, scaler: &GradScaler) -> Result<()> {
        self.add_by(name, |state| save(scaler, state))
    }

    /// Adds the states of the scalers of several losses, as parts `name.0`, `name.1` and so on. Synchronizes like
    /// [`GradScaler::state_dict`].
    ///
    /// # Errors
    ///
    /// The same as [`add_scaler`](Self::add_scaler). None of the states is added then.
    pub fn add_scalers(&mut self, name: &str, scalers: &PerLossScalers) -> Result<()> {
        self.add_by(name, |state| save_all(scalers, state))
    }
}

impl<'a> Restore<'a> {
    /// Restores a scaler. A disabled scaler is left as it is.
    pub fn scaler(self, name: &str, scaler: &'a mut GradScaler) -> Self {
        self.add(name, scaler)
    }

    /// Restores the scalers of several losses, which [`Checkpoint::add_scalers`] has saved.
    pub fn scalers(self, name: &str, scalers: &'a mut PerLossScalers) -> Self {
        self.add(name, scalers)
    }
}

fn save(scaler: &GradScaler, state: &mut SaveState<'_>) -> Result<()> {
    state.scaler(None, scaler.state_dict()?);
    Ok(())
}

fn save_all(scalers: &PerLossScalers, state: &mut SaveState<'_>) -> Result<()> {
    for (id, scaler) in scalers.state_dict()?.into_iter().enumerate() {
        state.scaler(Some(id), scaler);
    }
    Ok(())
}

impl Stateful for GradScaler {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        save(self, state)
    }

    /// Prepares to load a state. A disabled scaler is left as it is.
    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        let loaded = self.prepare_state(&saved.scaler(None)?)?;
        let set = |loaded| Prepared::step(move || self.set_state(loaded));
        Ok(loaded.map_or_else(Prepared::default, set))
    }
}

/// Saves one part for each loss: `name.0`, `name.1` and so on.
impl Stateful for PerLossScalers {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        save_all(self, state)
    }

    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        let states = (0..self.loss_count()).map(|loss| saved.scaler(Some(loss)));
        let loaded = self.prepare_states(&states.collect::<Result<Vec<_>>>()?)?;
        Ok(Prepared::step(move || self.set_states(loaded)))
    }
}

//! Scalers in a checkpoint.

use crate::checkpoint::{Prepared, SaveState, SavedState, Stateful};
use crate::error::Result;
use crate::scaler::{GradScaler, PerLossScalers};

/// Synchronizes like [`GradScaler::state_dict`], and fails like it between `unscale_` or `step` and `update`.
impl Stateful for GradScaler {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        state.scaler(None, self.state_dict()?);
        Ok(())
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
        for (id, scaler) in self.state_dict()?.into_iter().enumerate() {
            state.scaler(Some(id), scaler);
        }
        Ok(())
    }

    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        let states = (0..self.loss_count()).map(|loss| saved.scaler(Some(loss)));
        let loaded = self.prepare_states(&states.collect::<Result<Vec<_>>>()?)?;
        Ok(Prepared::step(move || self.set_states(loaded)))
    }
}

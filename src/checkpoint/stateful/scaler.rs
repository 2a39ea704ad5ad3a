//! Scalers.

use crate::GradScaler;
use crate::checkpoint::part::{Item, Part};
use crate::checkpoint::stateful::{Prepared, SaveState, SavedState, Stateful};
use crate::checkpoint::{Checkpoint, other_part};
use crate::error::Result;
use crate::scaler::{GradScalerState, PerLossScalers};

pub(crate) fn save_scaler(scaler: &GradScaler, state: &mut SaveState<'_>) -> Result<()> {
    state.whole(Part::Scaler(scaler.state_dict()?));
    Ok(())
}

pub(crate) fn save_scalers(scalers: &PerLossScalers, state: &mut SaveState<'_>) -> Result<()> {
    for (id, scaler) in scalers.state_dict()?.into_iter().enumerate() {
        state.numbered(id, Part::Scaler(scaler));
    }
    Ok(())
}

/// Returns the state in the part of this name, which is empty if it is that of a disabled scaler.
fn state(checkpoint: &Checkpoint, name: &str) -> Result<GradScalerState> {
    match checkpoint.find(name)? {
        Item::Part(Part::Scaler(state)) => Ok(state.clone()),
        Item::Part(Part::Empty) => Ok(GradScalerState::default()),
        other => Err(other_part(name, "a scaler", other)),
    }
}

impl Stateful for GradScaler {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        save_scaler(self, state)
    }

    /// Prepares to load a state. A disabled scaler is left as it is.
    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        saved.take_whole();
        let loaded = self.prepare_state(&state(saved.checkpoint, saved.name)?)?;
        let set = |loaded| Prepared::step(move || self.set_state(loaded));
        Ok(loaded.map_or_else(Prepared::default, set))
    }
}

/// Saves one part for each loss: `name.0`, `name.1` and so on.
impl Stateful for PerLossScalers {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        save_scalers(self, state)
    }

    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        saved.take_whole();
        let name = |loss| format!("{}.{loss}", saved.name);
        let states = (0..self.loss_count()).map(|loss| state(saved.checkpoint, &name(loss)));
        let loaded = self.prepare_states(&states.collect::<Result<Vec<_>>>()?)?;
        Ok(Prepared::step(move || self.set_states(loaded)))
    }
}

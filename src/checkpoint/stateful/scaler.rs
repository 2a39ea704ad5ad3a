//! Scalers.

use crate::checkpoint::part::Part;
use crate::checkpoint::stateful::{Prepared, SaveState, SavedState, Stateful};
use crate::checkpoint::{Checkpoint, other_part};
use crate::error::Result;
use crate::{GradScaler, GradScalerState, PerLossScalers};

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

/// Checks the part of that name against a scaler.
fn prepare<'a>(
    scaler: &'a mut GradScaler,
    checkpoint: &Checkpoint,
    name: &str,
) -> Result<Prepared<'a>> {
    let loaded = match checkpoint.part(name)? {
        Part::Scaler(state) => scaler.prepare_state(state)?,
        Part::Empty => scaler.prepare_state(&GradScalerState::default())?,
        other => return Err(other_part(name, "a scaler", other)),
    };
    // A disabled one stays as it is.
    Ok(loaded
        .map_or_else(Prepared::default, |loaded| Prepared::step(move || scaler.set_state(loaded))))
}

impl Stateful for GradScaler {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        save_scaler(self, state)
    }

    /// Prepares to take over a state. A disabled scaler stays as it is.
    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        saved.take_whole();
        prepare(self, saved.checkpoint, saved.name)
    }
}

/// One part for each loss: `name.0`, `name.1` and so on.
impl Stateful for PerLossScalers {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        save_scalers(self, state)
    }

    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        saved.take_whole();
        let mut all = Prepared::default();
        for (id, scaler) in self.scalers_mut().enumerate() {
            all = all.and(prepare(scaler, saved.checkpoint, &format!("{}.{id}", saved.name))?);
        }
        Ok(all)
    }
}

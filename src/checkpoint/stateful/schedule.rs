//! Learning-rate schedulers, each saved as a dict.

use crate::checkpoint::stateful::{Prepared, SaveState, SavedState, Stateful};
use crate::error::Result;
use crate::schedule::{PlateauScheduler, PlateauState, Progress, Scheduler};

impl Stateful for Scheduler {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        let Progress { last, bases, cycle, parts } = self.settled_progress()?;
        state.value("last_epoch", last)?;
        state.value("base_lrs", bases)?;
        if let Some(cycle) = cycle {
            state.value("T_cur", &cycle.position)?;
            state.value("T_i", &cycle.length)?;
        }
        if !parts.is_empty() {
            state.value("_schedulers", parts)?;
        }
        state.value("_last_lr", self.lrs())
    }

    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        let mut progress = self.progress().clone();
        progress.last = saved.value("last_epoch")?;
        progress.bases = saved.value("base_lrs")?;
        if let Some(cycle) = &mut progress.cycle {
            cycle.position = saved.value("T_cur")?;
            cycle.length = saved.value("T_i")?;
        }
        if !progress.parts.is_empty() {
            progress.parts = saved.value("_schedulers")?;
        }
        let lrs: Vec<f64> = saved.value("_last_lr")?;
        let loaded = self.with_progress(progress, &lrs)?;
        Ok(Prepared::new(move || self.resume(loaded)))
    }
}

impl Stateful for PlateauScheduler {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        let PlateauState { last_epoch, best, num_bad_epochs, cooldown_counter } = self.state();
        state.value("last_epoch", &last_epoch)?;
        state.value("best", &best)?;
        state.value("num_bad_epochs", &num_bad_epochs)?;
        state.value("cooldown_counter", &cooldown_counter)
    }

    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        let loaded = PlateauState {
            last_epoch: saved.value("last_epoch")?,
            best: saved.value("best")?,
            num_bad_epochs: saved.value("num_bad_epochs")?,
            cooldown_counter: saved.value("cooldown_counter")?,
        };
        loaded.check()?;
        Ok(Prepared::new(move || self.resume(loaded)))
    }
}

//! The history of a loss scale, saved as its last steps.

use crate::checkpoint::stateful::{Prepared, SaveState, SavedState, Stateful};
use crate::error::Result;
use crate::insight::{HistoryReport, ScaleHistory};

impl Stateful for ScaleHistory {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        let HistoryReport { total, steps } = self.report()?;
        state.value("total", &total)?;
        state.value("steps", &steps)
    }

    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        let loaded = HistoryReport::checked(saved.value("total")?, saved.value("steps")?)?;
        Ok(Prepared::new(move || self.resume(loaded)))
    }
}

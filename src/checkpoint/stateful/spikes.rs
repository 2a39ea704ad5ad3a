//! The histories of a spike detector.

use crate::checkpoint::stateful::{Prepared, SaveState, SavedState, Stateful};
use crate::error::Result;
use crate::ffi::OutsideRegions;
use crate::scaler::SpikeDetector;

impl Stateful for SpikeDetector {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        for (name, history) in self.histories() {
            if let Some(history) = history {
                state.tensor(name, history)?;
            }
        }
        Ok(())
    }

    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        let _own = OutsideRegions::enter();
        let mut loaded = [None, None];
        for (place, (name, _)) in loaded.iter_mut().zip(self.histories()) {
            if saved.contains(name)? {
                let history = saved.tensor(name)?;
                self.check(&history)?;
                *place = Some(history.f_contiguous()?);
            }
        }
        Ok(Prepared::new(move || self.resume(loaded)))
    }
}

//! The averages of weights, saved as a dict of the averages by name with the number of updates.

use std::collections::BTreeMap;

use crate::average::AveragedWeights;
use crate::checkpoint::stateful::{Prepared, SaveState, SavedState, Stateful};
use crate::error::Result;

impl Stateful for AveragedWeights {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        let (updates, rest) = self.count().read()?;
        state.value("n_averaged", &updates)?;
        state.value("rest", &rest)?;
        state.tensors(self.tensors())
    }

    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        let mut statistics = BTreeMap::new();
        for names in self.buffers() {
            for name in names.iter() {
                if saved.contains(name)? {
                    let statistic = saved.tensor(name)?;
                    statistics.entry(names.first.clone()).or_insert(statistic);
                }
            }
        }
        let loaded = self.checked(saved.value("n_averaged")?, saved.value("rest")?, statistics)?;
        Ok(saved.copy_to(self.averages())?.then(move || self.resume(loaded)))
    }
}

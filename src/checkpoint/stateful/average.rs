//! The averages of weights, saved as a dict of the averages by name with the number of updates. In PyTorch's format it
//! is the state of an `AveragedModel`, which also has the variables of the model that are not averaged.

use std::collections::{BTreeMap, HashSet};

use tch::Tensor;

use crate::average::AveragedWeights;
use crate::checkpoint::entry::Entry;
use crate::checkpoint::restore::names::batch_counts;
use crate::checkpoint::stateful::save::entry;
use crate::checkpoint::stateful::saved::{MODULE, UPDATES};
use crate::checkpoint::stateful::{Prepared, SaveState, SavedState, Stateful};
use crate::error::Result;

/// Returns what an `AveragedModel` has besides the averages, after this many updates.
fn beside(averages: &AveragedWeights, updates: u64) -> Result<BTreeMap<String, Entry>> {
    let updates = Tensor::from(i64::try_from(updates).unwrap_or(i64::MAX));
    let mut beside = BTreeMap::from([(UPDATES.to_owned(), Entry::in_memory(&updates)?)]);
    let written: HashSet<_> = averages.tensors().map(|(name, _)| name).collect();
    let mut known: HashSet<_> = written.iter().map(|name| name.as_str()).collect();
    for (name, tensor) in averages.not_averaged().filter(|(name, _)| !written.contains(name)) {
        beside.insert(format!("{MODULE}{name}"), entry(name, tensor)?);
        known.insert(name);
    }
    for name in batch_counts(&known) {
        beside.insert(format!("{MODULE}{name}"), Entry::in_memory(&Tensor::from(0i64))?);
    }
    Ok(beside)
}

impl Stateful for AveragedWeights {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        let (updates, rest) = self.count().read()?;
        state.value(UPDATES, &updates)?;
        state.value("rest", &rest)?;
        state.tensors(self.tensors())?;
        state.averages(beside(self, updates)?);
        Ok(())
    }

    /// Accepts the state of an `AveragedModel`, too.
    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        let from_python = saved.averaged_model()?;
        let mut statistics = BTreeMap::new();
        for names in self.buffers() {
            for name in names.iter() {
                if saved.contains(name)? {
                    let statistic = saved.tensor(name)?;
                    statistics.entry(names.first.clone()).or_insert(statistic);
                }
            }
        }
        let (updates, rest) = match from_python {
            // Its averages begin with the first weights, so that nothing is left of the start.
            Some(updates) => (updates, if updates == 0 { 1.0 } else { 0.0 }),
            None => (saved.value(UPDATES)?, saved.value("rest")?),
        };
        if from_python.is_some() {
            let names = self.tensors().chain(self.not_averaged()).map(|(name, _)| name);
            saved.leave_out_counts(&names.map(String::as_str).collect())?;
            saved.leave_out(self.not_averaged().map(|(name, _)| name));
        }
        let loaded = self.checked(updates, rest, statistics)?;
        Ok(saved.copy_to(self.averages())?.then(move || self.resume(loaded)))
    }
}

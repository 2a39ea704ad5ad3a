//! Models, each saved as its variables by name.

use std::collections::HashSet;

use tch::Tensor;
use tch::nn::VarStore;

use crate::checkpoint::entry::Entry;
use crate::checkpoint::other_part;
use crate::checkpoint::part::{Item, Part};
use crate::checkpoint::restore::names::batch_counts;
use crate::checkpoint::stateful::{Prepared, SaveState, SavedState, Stateful};
use crate::error::Result;

/// Records all variables, and the batch counts that PyTorch's norms have.
fn save(model: &VarStore, state: &mut SaveState<'_>) -> Result<()> {
    let variables = model.variables();
    state.tensors(&variables)?;
    let known: HashSet<_> = variables.keys().map(String::as_str).collect();
    let mut tensors = state.take_tensors();
    for name in batch_counts(&known) {
        tensors.insert(name, Entry::in_memory(&Tensor::from(0i64))?);
    }
    state.whole(Part::Model(tensors));
    Ok(())
}

fn prepare<'a>(model: &VarStore, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
    match saved.checkpoint.find(saved.name)? {
        Item::Part(Part::Model(_) | Part::Empty) => {}
        Item::Part(Part::State(state)) if !state.tensors.is_empty() => {}
        other => return Err(other_part(saved.name, "a model", other)),
    }
    saved.leave_out_values();
    let variables = model.variables();
    let mut sorted: Vec<_> = variables.iter().collect();
    sorted.sort_by_key(|(name, _)| *name);
    saved.copy(sorted, "in the model")
}

/// Saves and restores all variables, including those that are not trainable: the counterpart of `model.state_dict()`.
/// For each norm with running statistics, PyTorch's also has a `num_batches_tracked`: tch does not count batches, and so
/// 0 is saved.
impl Stateful for VarStore {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        save(self, state)
    }

    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        prepare(self, saved)
    }
}

/// A shared reference is enough, because restoring writes to the tensors and not to the `VarStore`.
impl Stateful for &VarStore {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        save(self, state)
    }

    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        prepare(self, saved)
    }
}

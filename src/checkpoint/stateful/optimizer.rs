//! Optimizers, each saved as its `state_dict` and restored by the names of its parameters, or by their positions.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use crate::checkpoint::entry::SavedBy;
use crate::checkpoint::part::{NamedPart, OptimizerPart, Part};
use crate::checkpoint::restore::names::Renames;
use crate::checkpoint::restore::{Options, Restored};
use crate::checkpoint::stateful::{Prepared, SaveState, SavedState, Stateful, entry};
use crate::checkpoint::{CheckpointError, other_part};
use crate::error::{Error, OptimizerError, Result, shown, unsaveable};
use crate::optim::{
    Adam, AdamW, Algorithm, AmpOptimizer as _, CheckedState, Optimizer, OptimizerState,
    ParamGroupState,
};
use crate::variables::Swapped;

/// Saves and restores the state of every parameter, and the groups with their options.
impl Stateful for Optimizer {
    /// Records the state. Synchronizes in the rare cases in which [`Optimizer::state_dict`] does.
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        if Swapped::has_any(self.parameters().as_slice())? {
            return Err(unsaveable(state.name(), SAVED).into());
        }
        let (saved, saved_by) = match (self.ranks(), state.group()) {
            (Some(ranks), Some(group)) if ranks.group() != group => {
                return Err(unsaveable(state.name(), OF_ANOTHER_GROUP).into());
            }
            (Some(_), Some(_)) => (self.state_here()?, SavedBy::ThisRank),
            _ => (self.state_dict()?, SavedBy::AnyRank),
        };
        let OptimizerState { state: tensors, param_groups } = saved;
        let mut entries = BTreeMap::new();
        for (parameter, tensors) in tensors {
            let tensors = tensors.into_iter().map(|(key, tensor)| {
                let mut entry = entry(&parameter, &tensor)?;
                entry.saved_by = saved_by;
                Ok((key, Box::new(entry)))
            });
            let tensors = tensors.collect::<Result<_>>()?;
            entries.insert(parameter, tensors);
        }
        state.whole(Part::Optimizer(OptimizerPart {
            state: entries,
            param_groups,
            params_are_numbers: false,
            adam_or_adamw: false,
            by_muon: self.stepped_by_muon(),
            others: BTreeMap::new(),
        }));
        Ok(())
    }

    /// Prepares to load a state. Variables that were added to the `VarStore` since are registered with the optimizer
    /// right away.
    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        if Swapped::has_any(self.parameters().as_slice())? {
            return Err(saved.wrong("param_groups", RESTORED.to_owned()));
        }
        let part = match saved.whole()? {
            NamedPart::Part(Part::Optimizer(part)) => part,
            other => return Err(other_part(saved.name, "an optimizer", other)),
        };
        let mut restored = Restored::default();
        let loaded = prepare(part, saved.name, self, saved.options, &mut restored)?;
        saved.report(restored);
        Ok(Prepared::new(move || self.finish_load(loaded)))
    }
}

const SAVED: &str = "the averages of its parameters are in their place, which it would take for new weights; drop the \
                     guard of `swap_in` first";
const OF_ANOTHER_GROUP: &str = "its state is divided among the ranks of another group than that of the checkpoint; pass \
                                the same group to `Checkpoint::sharded` as to `shard_over`";
const RESTORED: &str =
    "has parameters in whose place their averages are; drop the guard of `swap_in` first";

/// Checks a part against an optimizer and copies its tensors. The optimizer does not change, except that it registers
/// variables that were added to its `VarStore`.
fn prepare(
    part: &OptimizerPart,
    name: &str,
    optimizer: &mut Optimizer,
    options: &Options,
    restored: &mut Restored,
) -> Result<CheckedState> {
    optimizer.take_added()?;
    let OptimizerPart { state, param_groups, params_are_numbers, adam_or_adamw, .. } = part;
    restored.leave_out(name, part.others.keys().cloned().collect());
    let Options { strict, names: renames, .. } = options;
    if !params_are_numbers && !adam_or_adamw && *strict && renames.is_empty() {
        return optimizer.prepare_load(state, param_groups);
    }
    let mut param_groups = param_groups.clone();
    if *adam_or_adamw && matches!(optimizer.param_group(0)?.algorithm, Algorithm::AdamW(_)) {
        as_adamw(&mut param_groups);
    }
    let here = if *params_are_numbers {
        by_place(name, optimizer, &mut param_groups)?
    } else {
        by_prefix(name, &mut param_groups, renames)?
    };
    let listed = optimizer.listed_names()?;
    for name in param_groups.iter_mut().flat_map(|group| &mut group.params) {
        *name = listed.get(name).unwrap_or(name).clone();
    }
    let renamed = |name: &String| {
        let name = here.get(name).unwrap_or(name);
        listed.get(name).unwrap_or(name).clone()
    };
    let mut state: BTreeMap<_, BTreeMap<_, _>> = state
        .iter()
        .map(|(name, entries)| {
            let entries = entries.iter().map(|(key, entry)| (key.clone(), &**entry));
            (renamed(name), entries.collect())
        })
        .collect();
    skip(name, optimizer, renames, &mut state, &mut param_groups, restored);
    if !*strict {
        leave_out(name, optimizer, &mut state, &mut param_groups, restored)?;
    }
    let prepared = optimizer.prepare_load(&state, &param_groups);
    prepared.map_err(|error| match error {
        Error::Optimizer(OptimizerError::State { parameter, problem }) if *params_are_numbers => {
            let problem = format!("{problem} ({BY_PLACE})");
            Error::Optimizer(OptimizerError::State { parameter, problem })
        }
        error => error,
    })
}

const BY_PLACE: &str = "the file has no parameter names, so parameters were matched by position: build the \
                        optimizer from a list in Python's order, or in Python from `model.named_parameters()`";

/// Turns groups of Adam into groups of AdamW.
fn as_adamw(groups: &mut [ParamGroupState]) {
    for ParamGroupState { options, .. } in groups {
        if let Algorithm::Adam(Adam { betas, eps, weight_decay, amsgrad, maximize }) =
            options.algorithm
        {
            options.algorithm =
                Algorithm::AdamW(AdamW { betas, eps, weight_decay, amsgrad, maximize });
        }
    }
}

/// Replaces PyTorch's numbers by the names of the parameters in the same positions. Returns the name for each number.
pub(super) fn by_place(
    part: &str,
    optimizer: &mut Optimizer,
    groups: &mut [ParamGroupState],
) -> Result<HashMap<String, String>> {
    let ours = optimizer.state_names();
    let counts = |groups: &[Vec<String>]| groups.iter().map(Vec::len).collect::<Vec<_>>();
    let saved: Vec<_> = groups.iter().map(|group| group.params.clone()).collect();
    if counts(&saved) != counts(&ours) {
        let problem = format!(
            "has groups of {} parameters without names, and the optimizer has groups of {}; build it with the same \
             groups in the same order, or save with `named_parameters()` (PyTorch 2.6)",
            shown(&format!("{:?}", counts(&saved))),
            shown(&format!("{:?}", counts(&ours)))
        );
        let (part, tensor) = (part.to_owned(), "param_groups".to_owned());
        return Err(CheckpointError::Tensor { part, tensor, problem }.into());
    }
    let pairs = saved.into_iter().flatten().zip(ours.iter().flatten().cloned());
    for (group, names) in groups.iter_mut().zip(&ours) {
        group.params.clone_from(names);
    }
    Ok(pairs.collect())
}

/// Renames the parameters to their names in the target. Returns the new name for each old one.
pub(super) fn by_prefix(
    part: &str,
    groups: &mut [ParamGroupState],
    renames: &Renames,
) -> Result<HashMap<String, String>> {
    let renamed = renames.renamed(part, groups.iter().flat_map(|group| &group.params))?;
    let pairs = renamed.into_iter().map(|(here, name)| (name.to_owned(), here)).collect();
    for name in groups.iter_mut().flat_map(|group| &mut group.params) {
        *name = renames.of(name).into_owned();
    }
    Ok(pairs)
}

/// Removes the state of skipped parameters, which then count as not yet stepped. They stay in their saved group, or
/// join the first one.
pub(super) fn skip<T>(
    part: &str,
    optimizer: &Optimizer,
    renames: &Renames,
    state: &mut BTreeMap<String, T>,
    groups: &mut [ParamGroupState],
    restored: &mut Restored,
) {
    let known: BTreeSet<_> =
        known(optimizer).into_iter().filter(|name| renames.skips(name)).collect();
    let saved = groups.iter().flat_map(|group| &group.params);
    let saved: BTreeSet<_> = saved.filter(|name| renames.skips(name)).cloned().collect();
    let skipped: Vec<_> = saved.union(&known).cloned().collect();
    skipped.iter().for_each(|name| drop(state.remove(name)));
    for group in groups.iter_mut() {
        group.params.retain(|name| known.contains(name) || !saved.contains(name));
    }
    if let Some(first) = groups.first_mut() {
        first.params.extend(known.difference(&saved).cloned());
    }
    restored.skip(part, skipped);
}

/// Returns the names of an optimizer's parameters.
fn known(optimizer: &Optimizer) -> Vec<String> {
    let count = optimizer.parameters().as_slice().len();
    (0..count).filter_map(|index| optimizer.parameter_name(index)).collect()
}

/// Removes the parameters that the optimizer lacks. Those that only the optimizer has join the first group, and count
/// as not yet stepped.
pub(super) fn leave_out<T>(
    part: &str,
    optimizer: &Optimizer,
    state: &mut BTreeMap<String, T>,
    groups: &mut [ParamGroupState],
    restored: &mut Restored,
) -> Result<()> {
    let known = known(optimizer);
    let names: HashSet<_> = known.iter().collect();
    let mut unexpected = Vec::new();
    for group in groups.iter_mut() {
        let (kept, others) =
            std::mem::take(&mut group.params).into_iter().partition(|name| names.contains(name));
        group.params = kept;
        unexpected.extend::<Vec<_>>(others);
    }
    state.retain(|name, _| names.contains(name));
    let saved: HashSet<_> = groups.iter().flat_map(|group| group.params.clone()).collect();
    let missing: Vec<_> = known.into_iter().filter(|name| !saved.contains(name)).collect();
    if let Some(first) = groups.first_mut() {
        first.params.extend(missing.iter().cloned());
    }
    restored.judge(part, false, missing, unexpected)
}

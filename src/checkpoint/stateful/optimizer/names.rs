//! The names of an optimizer's parameters, in the target and in the checkpoint.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use crate::checkpoint::CheckpointError;
use crate::checkpoint::restore::Restored;
use crate::checkpoint::restore::names::Renames;
use crate::error::{Result, shown};
use crate::optim::{AmpOptimizer, Optimizer, ParamGroupState};

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

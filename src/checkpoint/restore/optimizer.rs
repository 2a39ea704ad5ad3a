//! Restoring optimizers.

#![forbid(unsafe_code)]

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::checkpoint::part::{OptimizerPart, Part};
use crate::checkpoint::restore::names::Names;
use crate::checkpoint::restore::{Restore, Restored};
use crate::checkpoint::{Checkpoint, CheckpointError, other_part};
use crate::error::{Error, Result};
use crate::optim::{Adam, AdamW, Algorithm, AmpOptimizer, Loaded, Optimizer, ParamGroupState};

/// Checks a part against an optimizer and makes copies of it. The optimizer does not change, except that it takes up
/// variables that were added to its VarStore.
pub(crate) fn prepare(
    checkpoint: &Checkpoint,
    name: &str,
    optimizer: &mut Optimizer,
    (renames, strict): (&Names, bool),
    restored: &mut Restored,
) -> Result<Loaded> {
    let part = match checkpoint.part(name)? {
        Part::Optimizer(part) => part,
        other => return Err(other_part(name, "an optimizer", other)),
    };
    optimizer.take_added()?;
    let OptimizerPart { state, param_groups, params_are_numbers, adam_or_adamw } = part;
    if !params_are_numbers && !adam_or_adamw && strict && renames.is_empty() {
        return optimizer.prepare_load(state, param_groups);
    }
    let mut param_groups = param_groups.clone();
    if *adam_or_adamw && matches!(optimizer.param_group(0)?.algorithm, Algorithm::AdamW(_)) {
        as_adamw(&mut param_groups);
    }
    let names = if *params_are_numbers {
        by_place(name, optimizer, &mut param_groups)?
    } else {
        by_prefix(name, &mut param_groups, renames)?
    };
    let renamed = |name: &String| names.get(name).unwrap_or(name).clone();
    let mut state: BTreeMap<_, BTreeMap<_, _>> = state
        .iter()
        .map(|(name, entries)| {
            let entries = entries.iter().map(|(key, entry)| (key.clone(), entry));
            (renamed(name), entries.collect())
        })
        .collect();
    skip(name, optimizer, renames, &mut state, &mut param_groups, restored);
    if !strict {
        leave_out(name, optimizer, &mut state, &mut param_groups, restored)?;
    }
    let prepared = optimizer.prepare_load(&state, &param_groups);
    prepared.map_err(|error| match error {
        Error::OptimizerState { parameter, problem } if *params_are_numbers => {
            let problem = format!("{problem} ({BY_PLACE})");
            Error::OptimizerState { parameter, problem }
        }
        error => error,
    })
}

const BY_PLACE: &str = "the file has no parameter names, and was matched by place: build the optimizer from a list in \
                        Python's order, or in Python from `model.named_parameters()`";

/// Takes an Adam for an AdamW.
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

/// Gives PyTorch's numbers the names of the parameters in the same places.
fn by_place(
    part: &str,
    optimizer: &mut Optimizer,
    groups: &mut [ParamGroupState],
) -> Result<HashMap<String, String>> {
    let ours = optimizer.state_names();
    let counts = |groups: &[Vec<String>]| groups.iter().map(Vec::len).collect::<Vec<_>>();
    let saved: Vec<_> = groups.iter().map(|group| group.params.clone()).collect();
    if counts(&saved) != counts(&ours) {
        let problem = format!(
            "has groups of {:?} parameters without names, and the optimizer has groups of {:?}; build it with the same \
             groups in the same order, or save with `named_parameters()` (PyTorch 2.6)",
            counts(&saved),
            counts(&ours)
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

/// Gives the parameters the names that they have here.
fn by_prefix(
    part: &str,
    groups: &mut [ParamGroupState],
    renames: &Names,
) -> Result<HashMap<String, String>> {
    let renamed = renames.renamed(part, groups.iter().flat_map(|group| &group.params))?;
    let pairs = renamed.into_iter().map(|(here, name)| (name.to_owned(), here)).collect();
    for name in groups.iter_mut().flat_map(|group| &mut group.params) {
        *name = renames.of(name).into_owned();
    }
    Ok(pairs)
}

/// Takes out the state of what is left as it is. It stays in its saved group or joins the first one, unstepped.
fn skip<T>(
    part: &str,
    optimizer: &Optimizer,
    renames: &Names,
    state: &mut BTreeMap<String, T>,
    groups: &mut [ParamGroupState],
    restored: &mut Restored,
) {
    let known = known(optimizer);
    let saved = groups.iter().flat_map(|group| &group.params);
    let mut skipped: Vec<_> =
        saved.chain(&known).filter(|name| renames.skips(name)).cloned().collect();
    skipped.sort();
    skipped.dedup();
    for name in &skipped {
        state.remove(name);
        let is_known = known.contains(name);
        for group in groups.iter_mut() {
            group.params.retain(|other| is_known || other != name);
        }
        if is_known && !groups.iter().any(|group| group.params.contains(name)) {
            groups.iter_mut().take(1).for_each(|first| first.params.push(name.clone()));
        }
    }
    restored.skipped_keys.extend(skipped.into_iter().map(|name| format!("{part}/{name}")));
}

/// The names of an optimizer's parameters.
fn known(optimizer: &Optimizer) -> Vec<String> {
    let count = optimizer.parameters().len();
    (0..count).filter_map(|index| optimizer.parameter_name(index)).collect()
}

/// Takes out what the optimizer does not have, and notes what it has alone; that joins the first group, unstepped.
fn leave_out<T>(
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
    Restore::judge(part, false, missing, unexpected, restored)
}

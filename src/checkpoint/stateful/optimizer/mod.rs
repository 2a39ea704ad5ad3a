//! Optimizers, each saved as its `state_dict` and restored by the names of its parameters, or by their positions.

mod names;

use std::collections::BTreeMap;

use crate::checkpoint::other_part;
use crate::checkpoint::part::{Item, OptimizerPart, Part};
use crate::checkpoint::restore::{Options, Restored};
use crate::checkpoint::stateful::save::entry;
use crate::checkpoint::stateful::{Prepared, SaveState, SavedState, Stateful};
use crate::error::{Error, OptimizerError, Result, unsaveable};
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
        let OptimizerState { state: tensors, param_groups } = self.state_dict()?;
        let mut entries = BTreeMap::new();
        for (parameter, tensors) in tensors {
            let tensors = tensors.into_iter().map(|(key, tensor)| {
                let entry = entry(&parameter, &tensor)?;
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
            Item::Part(Part::Optimizer(part)) => part,
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
        names::by_place(name, optimizer, &mut param_groups)?
    } else {
        names::by_prefix(name, &mut param_groups, renames)?
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
    names::skip(name, optimizer, renames, &mut state, &mut param_groups, restored);
    if !*strict {
        names::leave_out(name, optimizer, &mut state, &mut param_groups, restored)?;
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

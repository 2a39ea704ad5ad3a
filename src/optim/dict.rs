//! Saving and loading the state of an optimizer.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::error::{Error, Result};
use crate::ffi;
use crate::optim::state::{FirstStep, KEPT, State, complete, counts_steps, keys, used_keys};
use crate::optim::{Algorithm, Optimizer, ParamGroup};

/// Everything an optimizer needs to go on as if it had not been interrupted. The twin of what PyTorch's `state_dict`
/// returns, by parameter names instead of numbers.
#[derive(Debug)]
pub struct OptimizerState {
    /// For each parameter that has been stepped its tensors, by PyTorch's keys: `step` (f32, no dimensions) and, in the
    /// parameter's shape, `exp_avg`, `exp_avg_sq` and `max_exp_avg_sq`, or `momentum_buffer`, or `sum`.
    pub state: BTreeMap<String, BTreeMap<String, Tensor>>,
    /// The groups, in order.
    pub param_groups: Vec<ParamGroupState>,
}

/// A parameter group as it is saved.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ParamGroupState {
    /// Its options.
    #[serde(flatten)]
    pub options: ParamGroup,
    /// The names of its parameters.
    pub params: Vec<String>,
}

const STEP: &str = "step";

impl Optimizer {
    /// Returns the state.
    ///
    /// The tensors are the optimizer's own, not copies: later steps change them, as in PyTorch. Save or copy them before.
    ///
    /// What an option that was switched off does not use any more is there, too. Waits for the device
    /// only for an SGD with momentum whose first step on a GPU may have been skipped.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if libtorch fails.
    pub fn state_dict(&mut self) -> Result<OptimizerState> {
        let groups = self.groups.iter().map(|&options| ParamGroupState { options, params: vec![] });
        let mut param_groups: Vec<_> = groups.collect();
        let mut state = BTreeMap::new();
        for slot in &mut self.slots {
            param_groups[slot.group].params.push(slot.name.clone());
            let algorithm = self.groups[slot.group].algorithm;
            // A momentum buffer that is not in use yet is none.
            let unused =
                matches!(algorithm, Algorithm::Sgd(_)) && slot.state.first_step.is_ahead()?;
            if !unused && !slot.state.is_empty() {
                state.insert(slot.name.clone(), entries(&slot.state, &algorithm));
            }
        }
        Ok(OptimizerState { state, param_groups })
    }

    /// Loads a state: copies its tensors, in the dtypes and to the devices of the parameters, and takes over its groups
    /// and their options. As `load_state_dict` in PyTorch, by names.
    ///
    /// A parameter without tensors has not been stepped yet. The patterns of [`assign_group`](Self::assign_group) are no
    /// part of a state; those of groups that it does not have are forgotten. Waits for the devices of the loaded tensors.
    ///
    /// # Errors
    ///
    /// [`Error::OptimizerState`] for parameters or tensors that are missing, too many or of another shape;
    /// [`Error::OtherAlgorithm`]; [`Error::InvalidValue`] for an option outside its range. Nothing changes then.
    pub fn load_state_dict(&mut self, loaded: &OptimizerState) -> Result<()> {
        self.take_added()?;
        let groups: Vec<_> = loaded.param_groups.iter().map(|group| group.options).collect();
        let algorithm = self.groups[0].algorithm.name();
        for options in &groups {
            let given = options.algorithm.name();
            if given != algorithm {
                return Err(Error::OtherAlgorithm { algorithm, given });
            }
            options.algorithm.check(options.lr)?;
        }
        let members = members(loaded)?;
        self.check_names(&members, loaded)?;
        let mut slots = Vec::with_capacity(self.slots.len());
        for (slot, parameter) in self.slots.iter().zip(&self.parameters) {
            let refuse =
                |problem: String| Error::OptimizerState { parameter: slot.name.clone(), problem };
            let group = *members
                .get(slot.name.as_str())
                .ok_or_else(|| refuse("is in no group of the state".to_owned()))?;
            let entries = match loaded.state.get(&slot.name) {
                Some(entries) => {
                    Some(check(entries, &groups[group].algorithm, parameter, &refuse)?)
                }
                None => None,
            };
            slots.push((group, entries));
        }
        let states = copies(&slots, &groups, &self.parameters)?;
        self.rules.retain(|rule| rule.group < groups.len());
        self.groups = groups;
        for ((slot, (group, _)), state) in self.slots.iter_mut().zip(slots).zip(states) {
            (slot.group, slot.state) = (group, state);
        }
        Ok(())
    }

    /// Refuses names that the optimizer does not have.
    fn check_names(&self, members: &BTreeMap<&str, usize>, loaded: &OptimizerState) -> Result<()> {
        let known: std::collections::HashSet<_> =
            self.slots.iter().map(|slot| slot.name.as_str()).collect();
        let named = members.keys().copied().chain(loaded.state.keys().map(String::as_str));
        match named.into_iter().find(|name| !known.contains(name)) {
            Some(name) => Err(Error::OptimizerState {
                parameter: name.to_owned(),
                problem: "is no parameter of this optimizer".to_owned(),
            }),
            None => Ok(()),
        }
    }
}

/// The group of each parameter.
fn members(loaded: &OptimizerState) -> Result<BTreeMap<&str, usize>> {
    let mut members = BTreeMap::new();
    for (index, group) in loaded.param_groups.iter().enumerate() {
        for name in &group.params {
            if members.insert(name.as_str(), index).is_some() {
                let problem = "is in two groups of the state".to_owned();
                return Err(Error::OptimizerState { parameter: name.clone(), problem });
            }
        }
    }
    if loaded.param_groups.is_empty() {
        let (parameter, problem) = ("param_groups".to_owned(), "is empty".to_owned());
        return Err(Error::OptimizerState { parameter, problem });
    }
    Ok(members)
}

fn entries(state: &State, algorithm: &Algorithm) -> BTreeMap<String, Tensor> {
    let step = state.step.iter().map(|step| (STEP, step));
    let tensors = keys(algorithm).iter().copied().zip(&state.tensors);
    let tensors = tensors.filter_map(|(key, tensor)| Some((key, tensor.as_ref()?)));
    step.chain(tensors).map(|(key, tensor)| (key.to_owned(), tensor.shallow_clone())).collect()
}

/// The tensors of one parameter: its step, and the others in the order of [`keys`].
type Entries<'a> = (Option<&'a Tensor>, [Option<&'a Tensor>; KEPT]);

/// Finds the tensors that the algorithm keeps, of the parameter's shape, and no others. Those that it uses must be there.
fn check<'a>(
    entries: &'a BTreeMap<String, Tensor>,
    algorithm: &Algorithm,
    parameter: &Tensor,
    refuse: &dyn Fn(String) -> Error,
) -> Result<Entries<'a>> {
    let keys = keys(algorithm);
    let step = counts_steps(algorithm).then_some(STEP);
    let wanted = || keys.iter().copied().chain(step);
    if let Some(key) = entries.keys().find(|key| !wanted().any(|wanted| wanted == key.as_str())) {
        return Err(refuse(format!("has {key}, which {} does not keep", algorithm.name())));
    }
    let missing = |key: &str| refuse(format!("has no {key}"));
    if let Some(key) = used_keys(algorithm).iter().find(|key| !entries.contains_key(**key)) {
        return Err(missing(key));
    }
    let shape = parameter.size();
    let mut tensors = [None; KEPT];
    for (place, key) in tensors.iter_mut().zip(keys) {
        let Some(tensor) = entries.get(*key) else {
            continue;
        };
        if tensor.size() != shape {
            let found = tensor.size();
            return Err(refuse(format!("{key} has the shape {found:?}, but must have {shape:?}")));
        }
        *place = Some(tensor);
    }
    let step = step.map(|key| entries.get(key).ok_or_else(|| missing(key))).transpose()?;
    if let Some(step) = step {
        if step.numel() != 1 {
            let found = step.numel();
            return Err(refuse(format!("{STEP} has {found} elements, but must have one")));
        }
        let value = step.f_reshape([1i64])?.f_double_value(&[0])?;
        if !(value >= 0.0 && value.is_finite()) {
            return Err(refuse(format!("{STEP} is {value}, but must be finite and at least 0")));
        }
    }
    Ok((step, tensors))
}

/// Copies the tensors, in the dtypes and to the devices of the parameters.
fn copies(
    slots: &[(usize, Option<Entries<'_>>)],
    groups: &[ParamGroup],
    parameters: &[Tensor],
) -> Result<Vec<State>> {
    let mut states: Vec<_> = slots.iter().map(|_| State::default()).collect();
    let loaded = states.iter_mut().zip(slots).zip(parameters);
    let loaded = loaded.filter(|((_, (_, entries)), _)| entries.is_some());
    complete(loaded.map(|((state, (group, _)), p)| (state, &groups[*group].algorithm, p)))?;
    for ((state, (_, entries)), parameter) in states.iter_mut().zip(slots).zip(parameters) {
        let Some((step, tensors)) = entries else {
            continue;
        };
        if let (Some(kept), Some(step)) = (&mut state.step, step) {
            copy(step, kept)?;
        }
        for (kept, loaded) in state.tensors.iter_mut().zip(tensors) {
            let Some(loaded) = loaded else {
                continue;
            };
            if kept.is_none() {
                *kept = ffi::optim_states_new(&[parameter], 0.0)?.pop();
            }
            if let Some(kept) = kept {
                copy(loaded, kept)?;
            }
        }
        // Without a buffer there is none to go on with.
        let started = tensors.iter().any(Option::is_some);
        state.first_step = if started { FirstStep::Taken } else { FirstStep::Ahead };
    }
    Ok(states)
}

fn copy(from: &Tensor, to: &mut Tensor) -> Result<()> {
    let from = from.f_detach()?.f_reshape(to.size())?;
    tch::no_grad(|| to.f_copy_(&from))?;
    Ok(())
}

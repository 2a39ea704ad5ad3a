//! Loading the state of an optimizer.

use std::collections::{BTreeMap, HashMap, HashSet};

use tch::{Kind, Tensor};

use crate::error::{Error, Number, OptimizerError, Result};
use crate::ffi::{self, Master, OutsideRegions};
use crate::optim::first_step::FirstStep;
use crate::optim::masters::MASTER;
use crate::optim::state::{KEPT, STEP, State, Wanted, complete, counts_steps, keys, used};
use crate::optim::{
    Algorithm, MasterWeights, Optimizer, OptimizerState, ParamGroup, ParamGroupState,
};

/// The tensors of each parameter.
pub(crate) type SavedState<T> = BTreeMap<String, BTreeMap<String, T>>;

/// A tensor of a saved state, in memory or in a file.
pub(crate) trait Saved {
    fn shape(&self) -> Vec<i64>;

    fn is_complex(&self) -> bool;

    /// Returns the only element.
    fn item(&self) -> Result<f64>;

    /// Overwrites a tensor that has as many elements.
    fn copy_to(&self, to: &mut Tensor) -> Result<()>;
}

impl<T: Saved> Saved for &T {
    fn shape(&self) -> Vec<i64> {
        (**self).shape()
    }

    fn is_complex(&self) -> bool {
        (**self).is_complex()
    }

    fn item(&self) -> Result<f64> {
        (**self).item()
    }

    fn copy_to(&self, to: &mut Tensor) -> Result<()> {
        (**self).copy_to(to)
    }
}

impl Saved for Tensor {
    fn shape(&self) -> Vec<i64> {
        // A tensor without a shape gets one that no parameter has.
        ffi::sizes(self).unwrap_or_else(|_| vec![-1])
    }

    fn is_complex(&self) -> bool {
        Tensor::is_complex(self)
    }

    fn item(&self) -> Result<f64> {
        let _own = OutsideRegions::enter();
        Ok(self.f_reshape([1i64])?.f_double_value(&[0])?)
    }

    fn copy_to(&self, to: &mut Tensor) -> Result<()> {
        let _own = OutsideRegions::enter();
        let from = self.f_detach()?.f_reshape(to.size())?;
        tch::no_grad(|| to.f_copy_(&from))?;
        Ok(())
    }
}

/// A checked state that is ready to be loaded into an optimizer.
#[derive(Debug)]
pub(crate) struct Loaded {
    groups: Vec<ParamGroup>,
    /// The group and the state of each parameter.
    slots: Vec<(usize, State)>,
}

impl Optimizer {
    /// Loads a state: copies its tensors, converted to the dtypes and devices of the parameters, and takes over its
    /// groups and their options. The counterpart of `load_state_dict`, except that parameters are matched by name, a tied
    /// weight by any of its names.
    /// Synchronizes with the devices of the loaded tensors.
    ///
    /// A parameter without tensors in the state counts as not stepped yet. The model may be loaded before or after its
    /// optimizer: a loaded master weight is used if it rounds to its parameter at the next step; otherwise, and if the
    /// state has none, the master is made from the parameter in that step, so that no value written to the parameter is
    /// lost. The patterns of [`assign_group`](Self::assign_group) are not part of a state; those for groups that the
    /// state does not have are discarded.
    ///
    /// # Errors
    ///
    /// [`OptimizerError::State`] for parameters or tensors that are missing, unexpected or of another shape;
    /// [`OptimizerError::OtherAlgorithm`]; [`Error::InvalidArgument`] for an option outside its range. Nothing is
    /// changed then.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, nn};
    /// use tch_amp::optim::Sgd;
    ///
    /// let vs = nn::VarStore::new(Device::Cpu);
    /// let w = vs.root().var("w", &[1], nn::Init::Const(1.0));
    /// let mut opt = Sgd::default().momentum(0.5).build(&vs, 0.25)?;
    /// opt.backward_step(&w.sum(None))?;
    ///
    /// let mut resumed = Sgd::default().build(&vs, 0.1)?;
    /// resumed.load_state_dict(&opt.state_dict()?)?;
    /// resumed.backward_step(&w.sum(None))?;
    /// // The second update has momentum: 0.25 * (0.5 * 1 + 1).
    /// assert_eq!(w.double_value(&[0]), 1.0 - 0.25 - 0.375);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn load_state_dict(&mut self, loaded: &OptimizerState) -> Result<()> {
        let loaded = self.prepare_load(&loaded.state, &loaded.param_groups)?;
        self.finish_load(loaded);
        Ok(())
    }

    /// Checks a state and copies it. The optimizer does not change, except that it takes up variables that were added
    /// to its `VarStore`.
    pub(crate) fn prepare_load<T: Saved>(
        &mut self,
        state: &SavedState<T>,
        param_groups: &[ParamGroupState],
    ) -> Result<Loaded> {
        self.take_added()?;
        let listed = self.listed_names()?;
        let listed = |name: &'_ String| listed.get(name).unwrap_or(name).clone();
        let groups: Vec<_> = param_groups.iter().map(|group| group.options).collect();
        let algorithm = self.groups[0].algorithm.name();
        for options in &groups {
            let given = options.algorithm.name();
            if given != algorithm {
                return Err(Error::Optimizer(OptimizerError::OtherAlgorithm { algorithm, given }));
            }
            options.algorithm.check(options.lr)?;
        }
        let members = members(param_groups, listed)?;
        let state: BTreeMap<_, _> =
            state.iter().map(|(name, entries)| (listed(name), entries)).collect();
        self.check_names(members.keys().chain(state.keys()))?;
        let (mut slots, mut places) = (Vec::with_capacity(self.slots.len()), Vec::new());
        for (index, (slot, parameter)) in self.slots.iter().zip(&self.parameters).enumerate() {
            let refuse = |problem: String| {
                Error::Optimizer(OptimizerError::State { parameter: slot.name.clone(), problem })
            };
            let group = *members
                .get(&slot.name)
                .ok_or_else(|| refuse("is in no group of the state".to_owned()))?;
            let algorithm = groups[group].algorithm.of(slot.is_matrix);
            let entries = match state.get(&slot.name) {
                Some(entries) => {
                    let master = self.masters.of(parameter, index);
                    Some(check(entries, &algorithm, parameter, master, &refuse)?)
                }
                None => None,
            };
            places.push(group);
            slots.push((algorithm, entries.filter(|_| !slot.elsewhere)));
        }
        let states = copies(&slots, &self.parameters, self.masters)?;
        Ok(Loaded { groups, slots: places.into_iter().zip(states).collect() })
    }

    /// Takes over a state that was prepared from this optimizer, which has not changed since.
    pub(crate) fn finish_load(&mut self, loaded: Loaded) {
        let Loaded { groups, slots } = loaded;
        self.rules.retain(|rule| rule.group < groups.len());
        self.groups = groups;
        for (index, (slot, (group, state))) in self.slots.iter_mut().zip(slots).enumerate() {
            (slot.group, slot.state) = (group, state);
            // The model may be loaded before or after the optimizer: the next step keeps a master only if it rounds to
            // the parameter.
            self.stamps.forget(index);
        }
    }

    /// The name under which a parameter is listed, by each of its other names.
    pub(crate) fn listed_names(&mut self) -> Result<HashMap<String, String>> {
        self.take_names()?;
        let names = self
            .slots
            .iter()
            .flat_map(|slot| slot.aliases.iter().map(|alias| (alias.clone(), slot.name.clone())));
        Ok(names.collect())
    }

    /// Refuses names that the optimizer does not have.
    fn check_names<'n>(&self, mut names: impl Iterator<Item = &'n String>) -> Result<()> {
        let known: HashSet<_> = self.slots.iter().map(|slot| &slot.name).collect();
        match names.find(|name| !known.contains(name)) {
            Some(name) => Err(Error::Optimizer(OptimizerError::State {
                parameter: name.clone(),
                problem: "is not a parameter of this optimizer; an optimizer that is built from a list without names calls \
                          its parameters `0`, `1` and so on"
                    .to_owned(),
            })),
            None => Ok(()),
        }
    }
}

/// The group of each parameter, by the name under which it is listed.
fn members(
    param_groups: &[ParamGroupState],
    listed: impl Fn(&String) -> String,
) -> Result<BTreeMap<String, usize>> {
    let mut members = BTreeMap::new();
    for (index, group) in param_groups.iter().enumerate() {
        for name in &group.params {
            if members.insert(listed(name), index).is_some() {
                let problem =
                    "is in two groups of the state, or in one under two names of a tied weight"
                        .to_owned();
                return Err(Error::Optimizer(OptimizerError::State {
                    parameter: name.clone(),
                    problem,
                }));
            }
        }
    }
    if param_groups.is_empty() {
        let (parameter, problem) = ("param_groups".to_owned(), "is empty".to_owned());
        return Err(Error::Optimizer(OptimizerError::State { parameter, problem }));
    }
    Ok(members)
}

/// The tensors of one parameter.
#[derive(Debug)]
struct Entries<'a, T> {
    step: Option<&'a T>,
    /// In the order of [`keys`].
    tensors: [Option<&'a T>; KEPT],
    /// The f32 master weight, in every mode. If absent, training resumes from the parameter itself.
    master: Option<&'a T>,
}

/// Finds the tensors that the algorithm keeps and checks their shapes. Unknown tensors are refused, and the ones that
/// the algorithm uses are required.
fn check<'a, T: Saved>(
    entries: &'a BTreeMap<String, T>,
    algorithm: &Algorithm,
    parameter: &Tensor,
    master: Master,
    refuse: &dyn Fn(String) -> Error,
) -> Result<Entries<'a, T>> {
    let keys = keys(algorithm);
    let step = counts_steps(algorithm, master).then_some(STEP);
    // A run in another mode may have saved these.
    let others = [MASTER, STEP].into_iter().filter(|_| master != Master::None);
    let wanted = || keys.iter().copied().chain(step).chain(others.clone());
    if let Some(key) = entries.keys().find(|key| !wanted().any(|wanted| wanted == key.as_str())) {
        let name = algorithm.name();
        return Err(refuse(match key.as_str() {
            MASTER => format!("has {MASTER}: build this optimizer with `master_weights`"),
            key => format!("has {key}, which {name} does not keep"),
        }));
    }
    let missing = |key: &str| refuse(format!("has no {key}"));
    let mut required = keys.iter().zip(used(algorithm)).filter(|(_, used)| *used);
    if let Some((key, _)) = required.find(|(key, _)| !entries.contains_key(**key)) {
        return Err(missing(key));
    }
    let shape = parameter.size();
    let mut tensors = [None; KEPT];
    let mut kept = None;
    let places = tensors.iter_mut().zip(keys.iter().copied());
    for (place, key) in places.chain([(&mut kept, MASTER)]) {
        let Some(tensor) = entries.get(key) else {
            continue;
        };
        let found = tensor.shape();
        if found != shape {
            return Err(refuse(format!("{key} has the shape {found:?}, but must have {shape:?}")));
        }
        if tensor.is_complex() {
            return Err(refuse(format!("{key} is complex, but must be real")));
        }
        *place = Some(tensor);
    }
    let step = step.map(|key| entries.get(key).ok_or_else(|| missing(key))).transpose()?;
    if let Some(step) = step {
        let found = step.shape();
        if found.iter().any(|&size| size != 1) {
            return Err(refuse(format!(
                "{STEP} has the shape {found:?}, but must have one element"
            )));
        }
        let value = step.item()?;
        if !(value >= 0.0 && value.is_finite()) {
            let value = Number(value);
            return Err(refuse(format!("{STEP} is {value}, but must be finite and at least 0")));
        }
    }
    Ok(Entries { step, tensors, master: kept })
}

/// Copies the tensors, in the dtypes and to the devices of the parameters.
fn copies<T: Saved>(
    slots: &[(Algorithm, Option<Entries<'_, T>>)],
    parameters: &[Tensor],
    masters: MasterWeights,
) -> Result<Vec<State>> {
    let mut states: Vec<_> = slots.iter().map(|_| State::default()).collect();
    let loaded = states.iter_mut().zip(slots).zip(parameters).enumerate();
    let loaded = loaded.filter(|(_, ((_, (_, entries)), _))| entries.is_some());
    complete(loaded.map(|(index, ((state, (algorithm, _)), parameter))| Wanted {
        state,
        algorithm: *algorithm,
        parameter,
        master: masters.of(parameter, index),
    }))?;
    for (index, (state, (_, entries))) in states.iter_mut().zip(slots).enumerate() {
        if let Some(entries) = entries {
            let parameter = &parameters[index];
            copy(state, entries, parameter, masters.of(parameter, index))?;
        }
    }
    Ok(states)
}

/// Copies the tensors of one parameter into a complete state.
fn copy<T: Saved>(
    state: &mut State,
    entries: &Entries<'_, T>,
    parameter: &Tensor,
    master: Master,
) -> Result<()> {
    if let (Some(kept), Some(step)) = (&mut state.step, entries.step) {
        step.copy_to(kept)?;
    }
    for (kept, loaded) in state.tensors.iter_mut().zip(entries.tensors) {
        let Some(loaded) = loaded else {
            continue;
        };
        if kept.is_none() {
            *kept = ffi::optim_states_new(&[parameter], master.state_kind(), 0.0)?.pop();
        }
        if let Some(kept) = kept {
            loaded.copy_to(kept)?;
        }
    }
    // If absent, the next step makes it from the parameter.
    match entries.master {
        Some(loaded) => load_master(state, loaded, master)?,
        None => state.master = None,
    }
    // Without a momentum buffer, the next gradient starts one.
    let started = entries.tensors.iter().any(Option::is_some);
    state.first_step = if started { FirstStep::Taken } else { FirstStep::Ahead };
    Ok(())
}

fn load_master<T: Saved>(state: &mut State, loaded: &T, master: Master) -> Result<()> {
    match &mut state.master {
        Some(kept) if master == Master::Remainder => {
            let mut numbers = Tensor::f_empty(kept.size(), (Kind::Float, kept.device()))?;
            loaded.copy_to(&mut numbers)?;
            state.loaded = Some(numbers);
            Ok(())
        }
        Some(kept) => loaded.copy_to(kept),
        None => Ok(()),
    }
}

//! Saving and loading the state of an optimizer.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use crate::capture;
use crate::error::{Error, Number, OptimizerError, Result, nearest, shown};
use crate::ffi::{self, Master, MomentFormat, OutsideRegions, StateShape};
use crate::optim::algorithms::{EXPONENTS, KEPT, Spec};
use crate::optim::saved::{OptimizerState, ParamGroupState, Saved};
use crate::optim::shards::{Ranks, Shards};
use crate::optim::state::{
    FirstStep, MASTER, ParameterState, STEP, Wanted, allocate_missing_state, counts_steps,
    exponents_shape,
};
use crate::optim::{Algorithm, Optimizer, ParamGroup};

/// A checked state that is ready to be loaded into an optimizer.
#[derive(Debug)]
pub(crate) struct CheckedState {
    groups: Vec<ParamGroup>,
    /// The group and the state of each parameter.
    slots: Vec<(usize, ParameterState)>,
}

impl Optimizer {
    /// The names of the parameters in each group, in order. For Muon, those that it steps come first.
    pub(crate) fn state_names(&self) -> Vec<Vec<String>> {
        let mut names = vec![Vec::new(); self.groups.len()];
        for by_adamw in [false, true] {
            for slot in &self.slots {
                let algorithm = &self.groups[slot.group].algorithm;
                if algorithm.leaves_to_adamw(slot.dims) == by_adamw {
                    names[slot.group].push(slot.name.clone());
                }
            }
        }
        names
    }

    /// The names of the parameters that Muon steps.
    pub(crate) fn stepped_by_muon(&self) -> BTreeSet<String> {
        let all = self.slots.iter().enumerate();
        let by_muon = all.filter(|(index, _)| matches!(self.algorithm(*index), Algorithm::Muon(_)));
        by_muon.map(|(_, slot)| slot.name.clone()).collect()
    }

    /// Returns the state. The counterpart of `state_dict`.
    ///
    /// The tensors are the optimizer's own, not copies: later steps change them, as in PyTorch. Save or copy them
    /// before the next step.
    ///
    /// Tensors that are no longer used, such as `max_exp_avg_sq` after `amsgrad` was switched off, are included.
    /// Synchronizes only for an SGD with momentum whose first step on a GPU may have been skipped.
    ///
    /// If the state is divided among ranks, all of them call this. Rank 0 gets the complete state, which is the same
    /// whatever the number of ranks, and the others get the tensors that they keep themselves.
    ///
    /// # Errors
    ///
    /// [`OptimizerError::Parameter`](crate::optim::OptimizerError::Parameter) for a variable that was added to the
    /// `VarStore` and cannot be taken up; [`Error::Torch`](crate::Error::Torch) if libtorch fails.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, nn};
    /// use tch_amp::optim::Sgd;
    ///
    /// let vs = nn::VarStore::new(Device::Cpu);
    /// let w = vs.root().var("w", &[1], nn::Init::Const(4.0));
    /// let mut opt = Sgd { momentum: 0.9, ..Default::default() }.build(&vs, 0.25)?;
    /// opt.backward_step(&(&w * 3.0).sum(None))?;
    /// let state = opt.state_dict()?;
    /// assert_eq!(state.state["w"]["momentum_buffer"].double_value(&[0]), 3.0);
    /// assert_eq!(state.param_groups[0].options.lr, 0.25);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn state_dict(&mut self) -> Result<OptimizerState> {
        let state = self.state_here();
        match self.shards.as_deref().map(Shards::ranks) {
            Some(ranks) => ranks.gather_state(state),
            None => state,
        }
    }

    /// The ranks that the state is divided among, if it is.
    pub(crate) fn ranks(&self) -> Option<Arc<dyn Ranks>> {
        self.shards.as_deref().map(Shards::ranks)
    }

    /// Returns the state, without the tensors that other ranks keep.
    pub(crate) fn state_here(&mut self) -> Result<OptimizerState> {
        capture::refuse("state_dict", "call it after `replay`")?;
        self.take_added()?;
        self.take_driven_rates()?;
        self.refresh_stale_masters()?;
        self.settle_loaded_masters()?;
        if self.groups[0].algorithm.spec().begins_with_state() {
            // PyTorch requires it for every parameter.
            let here =
                (0..self.slots.len()).filter(|&index| !self.slots[index].owned_by_other_rank);
            self.allocate_missing_state(&here.collect::<Vec<_>>())?;
        }
        let groups = self.groups.iter().map(|&options| ParamGroupState { options, params: vec![] });
        let mut param_groups: Vec<_> = groups.collect();
        let mut state = BTreeMap::new();
        for (index, slot) in self.slots.iter_mut().enumerate() {
            param_groups[slot.group].params.push(slot.name.clone());
            let algorithm = self.groups[slot.group].algorithm.of(slot.dims);
            // A momentum buffer that is not in use yet is not saved.
            let unused =
                matches!(algorithm, Algorithm::Sgd(_)) && slot.state.first_step.is_ahead()?;
            let parameter = &self.parameters[index];
            let master = self.masters.of(parameter, index);
            let kept_as = self.moments.of(parameter);
            let mut entries = entries(&slot.state, algorithm.spec(), kept_as, unused);
            if let Some(numbers) = slot.state.master_numbers(master, parameter)? {
                entries.insert(MASTER.to_owned(), numbers);
            }
            if !entries.is_empty() {
                state.insert(slot.name.clone(), entries);
            }
        }
        Ok(OptimizerState { state, param_groups })
    }

    /// Loads a state: copies its tensors, converted to the dtypes and devices of the parameters, and takes over its
    /// groups and their options. The counterpart of `load_state_dict`, except that parameters are matched by name, a
    /// tied weight by any of its names.
    /// Synchronizes with the devices of the loaded tensors.
    ///
    /// A parameter without tensors in the state counts as not stepped yet. The model may be loaded before or after its
    /// optimizer: a loaded master weight is used if it rounds to its parameter at the next step; otherwise, and if the
    /// state has none, the master is made from the parameter in that step, so that no value written to the parameter is
    /// lost. The master weight of a parameter that is f32 or f64 by now becomes the parameter itself, under the same
    /// condition, in this call and once more in the next step. The patterns of [`assign_group`](Self::assign_group) are
    /// not part of a state; those for groups that the state does not have are discarded.
    ///
    /// Moments that were saved in another mode of [`MomentDtype`](crate::optim::MomentDtype) are converted, f32 to
    /// fewer bits by rounding to nearest. In 8 bits, an `exp_avg_sq` of zero becomes the lowest value of its block's
    /// window (at most 2^-31 of the block's largest), and an `exp_avg` larger than any that a step can store is cut
    /// off. Muon counts steps for the dither of a bf16 momentum, from 0 if the saved state has no count.
    ///
    /// # Errors
    ///
    /// [`OptimizerError::State`] for parameters or tensors that are missing, unexpected or of another shape, and for
    /// moments that would become infinite in fp16; [`OptimizerError::OtherAlgorithm`]; [`Error::InvalidArgument`] for
    /// an option outside its range, or for `amsgrad` with low-bit moments. Nothing is changed then.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, nn};
    /// use tch_amp::optim::Sgd;
    ///
    /// let vs = nn::VarStore::new(Device::Cpu);
    /// let w = vs.root().var("w", &[1], nn::Init::Const(1.0));
    /// let mut opt = Sgd { momentum: 0.5, ..Default::default() }.build(&vs, 0.25)?;
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
        let state = loaded.state.iter().map(|(name, tensors)| {
            (name.clone(), tensors.iter().map(|(key, tensor)| (key.clone(), tensor)).collect())
        });
        let loaded = self.prepare_load(&state.collect(), &loaded.param_groups)?;
        self.finish_load(loaded);
        Ok(())
    }

    /// Checks a state and copies it. The optimizer does not change, except that it takes up variables that were added
    /// to its `VarStore`.
    pub(crate) fn prepare_load<T: Deref<Target: Saved>>(
        &mut self,
        state: &BTreeMap<String, BTreeMap<String, T>>,
        param_groups: &[ParamGroupState],
    ) -> Result<CheckedState> {
        capture::refuse("load_state_dict", "call it outside of the iteration")?;
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
            self.moments.check(&options.algorithm)?;
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
            let algorithm = groups[group].algorithm.of(slot.dims);
            let master = self.masters.of(parameter, index);
            let kept_as = self.moments.of(parameter);
            let entries = state.get(&slot.name);
            let entries = entries
                .map(|entries| check(entries, &algorithm, parameter, kept_as, master, &refuse))
                .transpose()?;
            places.push(group);
            slots.push(match entries {
                Some(entries) if slot.owned_by_other_rank => {
                    entries.elsewhere(master != Master::None)
                }
                entries => entries,
            });
        }
        let algorithms = places.iter().zip(&self.slots);
        let algorithms = algorithms.map(|(&group, slot)| groups[group].algorithm.of(slot.dims));
        let algorithms: Vec<_> = algorithms.collect();
        let states = self.copies(&slots, &algorithms)?;
        Ok(CheckedState { groups, slots: places.into_iter().zip(states).collect() })
    }

    /// Takes over a state that was prepared from this optimizer, which has not changed since.
    pub(crate) fn finish_load(&mut self, loaded: CheckedState) {
        let CheckedState { groups, slots } = loaded;
        self.note_change("the state of the optimizer");
        self.rules.retain(|rule| rule.group < groups.len());
        self.groups = groups;
        self.leave_rates_to_host();
        for (index, (slot, (group, state))) in self.slots.iter_mut().zip(slots).enumerate() {
            (slot.group, slot.state) = (group, state);
            // The model may be loaded before or after the optimizer: the next step keeps a master only if it rounds to
            // the parameter.
            self.stamps.forget(index);
        }
        // The next step does it again, and reports a failure.
        let _written = self.write_loaded_masters();
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
                problem: format!("is not a parameter of this optimizer; {}", advice(name, &known)),
            })),
            None => Ok(()),
        }
    }
}

/// Returns the advice for a name that is not among those of the parameters.
fn advice(name: &str, known: &HashSet<&String>) -> String {
    let known = || known.iter().map(|known| known.as_str());
    // Wrappers of a module, such as those of DDP and `torch.compile`, put their names before the others.
    let prefix = |inner: &str| Some(name.strip_suffix(inner)?).filter(|it| it.ends_with('.'));
    let wrapped = known().filter_map(|inner| Some((prefix(inner)?, inner)));
    if let Some((prefix, inner)) = wrapped.min_by_key(|(prefix, _)| prefix.len()) {
        let (prefix, inner) = (shown(prefix), shown(inner));
        return format!("it has `{inner}`: restore with `rename_prefix(\"{prefix}\", \"\")`");
    }
    match nearest(name, known()) {
        Some(near) => format!("did you mean `{}`?", shown(near)),
        None => "an optimizer that is built from a list without names calls its parameters `0`, `1` and so on"
            .to_owned(),
    }
}

fn entries(
    state: &ParameterState,
    algorithm: &dyn Spec,
    kept_as: MomentFormat,
    unused: bool,
) -> BTreeMap<String, Tensor> {
    let step = state.step.iter().map(|step| (STEP, step));
    let tensors = algorithm.tensors(kept_as).iter().zip(&state.tensors);
    let tensors = tensors.filter_map(|(described, tensor)| Some((described.key, tensor.as_ref()?)));
    let tensors = step.chain(tensors.filter(|_| !unused));
    tensors.map(|(key, tensor)| (key.to_owned(), tensor.shallow_clone())).collect()
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
struct CheckedTensors<'a, T> {
    step: Option<&'a T>,
    most_steps: u64,
    /// In the order of [`Spec::tensors`].
    tensors: [Option<&'a T>; KEPT],
    /// Of 8-bit moments.
    exponents: Option<&'a T>,
    /// The f32 master weight, in every mode. If absent, training resumes from the parameter itself.
    master: Option<&'a T>,
}

impl<T> CheckedTensors<'_, T> {
    /// Which tensors a state has that is loaded from these.
    fn kept(&self, kept_as: MomentFormat) -> [bool; KEPT] {
        let [first, second, third] = self.tensors.map(|tensor| tensor.is_some());
        // A maximum that is no longer used has no place beside codes.
        [first, second, if kept_as == MomentFormat::EightBit { first && second } else { third }]
    }

    /// Returns the part that a rank loads of a parameter that another one steps: the master that becomes the parameter
    /// on all ranks.
    fn elsewhere(self, is_half: bool) -> Option<Self> {
        let Self { master, .. } = self;
        let (step, tensors, exponents) = (None, [None; KEPT], None);
        (master.is_some() && !is_half).then_some(Self {
            step,
            most_steps: 0,
            tensors,
            exponents,
            master,
        })
    }
}

/// The largest number of steps that is loaded: every f32 up to it is an `i64` as well, in which random numbers are
/// counted.
const MOST_STEPS: f64 = (1u64 << 62) as f64;

/// Finds the tensors that the algorithm keeps and checks their shapes. Unknown tensors are refused. Those that the
/// algorithm uses with any options are required once a state was begun; others are made by the first step that needs
/// them.
fn check<'a, T: Deref<Target: Saved>>(
    entries: &'a BTreeMap<String, T>,
    algorithm: &Algorithm,
    parameter: &Tensor,
    kept_as: MomentFormat,
    master: Master,
    refuse: &dyn Fn(String) -> Error,
) -> Result<CheckedTensors<'a, T::Target>> {
    let name = algorithm.name();
    let algorithm = algorithm.spec();
    let described = algorithm.tensors(MomentFormat::Plain);
    let coded = algorithm.tensors(MomentFormat::EightBit);
    let keys = described.iter().chain(coded).map(|described| described.key);
    let known = |key: &str| [STEP, MASTER].contains(&key) || keys.clone().any(|known| known == key);
    if let Some(key) = entries.keys().find(|key| !known(key)) {
        return Err(refuse(format!("has {}, which {name} does not keep", shown(key))));
    }
    let is_half = matches!(parameter.kind(), Kind::Half | Kind::BFloat16);
    if master == Master::None && is_half && entries.contains_key(MASTER) {
        let problem = format!("has {MASTER}: build this optimizer with `master_weights`");
        return Err(refuse(problem));
    }
    check_missing(entries, algorithm, parameter.dim(), refuse)?;
    let of_shape = |key: &str, shape: StateShape| {
        let Some(tensor) = entries.get(key).map(Deref::deref) else { return Ok(None) };
        let (found, shape) = (tensor.shape(), shape.of(parameter));
        if found != shape {
            return Err(refuse(format!("{key} has the shape {found:?}, but must have {shape:?}")));
        }
        if tensor.is_complex() {
            return Err(refuse(format!("{key} is complex, but must be real")));
        }
        Ok(Some(tensor))
    };
    let exponents = entries.get(EXPONENTS).map(Deref::deref);
    match exponents {
        Some(exponents) => check_codes(entries, exponents, refuse)?,
        None => {
            let kind = |key: &str| entries.get(key).and_then(|tensor| tensor.kind());
            if (kind("exp_avg"), kind("exp_avg_sq")) == (Some(Kind::Int8), Some(Kind::Uint8)) {
                return Err(refuse(format!("has 8-bit moments without {EXPONENTS}")));
            }
        }
    }
    let mut tensors = [None; KEPT];
    for (place, described) in tensors.iter_mut().zip(described) {
        *place = of_shape(described.key, described.shape)?;
        if let Some(tensor) = *place
            && kept_as == MomentFormat::Plain
        {
            let (kind, _) = kept_as.layout(0, master.state_kind(), described.shape);
            check_range(tensor, described.key, kind.unwrap_or(parameter.kind()), refuse)?;
        }
    }
    let step = entries.get(STEP).map(Deref::deref);
    let steps = step.map(|step| count(step, refuse)).transpose()?;
    let step = step.filter(|_| counts_steps(algorithm, kept_as, master));
    let most_steps = steps.map_or(0, |steps| steps.ceil() as u64);
    Ok(CheckedTensors {
        step,
        most_steps,
        tensors,
        exponents,
        master: of_shape(MASTER, StateShape::Like)?,
    })
}

/// Refuses what would be infinite. No moments leave the range of another dtype than fp16, so that these are not read
/// once more.
fn check_range<T: Saved>(
    tensor: &T,
    key: &str,
    kind: Kind,
    refuse: &dyn Fn(String) -> Error,
) -> Result<()> {
    match if kind == Kind::Half { tensor.beyond(kind)? } else { 0 } {
        0 => Ok(()),
        count => Err(refuse(format!(
            "{key} has {count} numbers that fp16 cannot hold: build this optimizer with `master_weights`, beside which it \
             is f32"
        ))),
    }
}

/// Checks 8-bit moments, whose exponents are there.
fn check_codes<T: Deref<Target: Saved>>(
    entries: &BTreeMap<String, T>,
    exponents: &T::Target,
    refuse: &dyn Fn(String) -> Error,
) -> Result<()> {
    let codes = [("exp_avg", Kind::Int8), ("exp_avg_sq", Kind::Uint8), (EXPONENTS, Kind::Uint8)];
    for (key, kind) in codes {
        if entries.get(key).and_then(|tensor| tensor.kind()) != Some(kind) {
            return Err(refuse(format!("has {EXPONENTS}, but {key} is not in {kind:?}")));
        }
    }
    let count = entries.get("exp_avg").map_or(0, |tensor| ffi::elements(&tensor.shape()));
    let (found, needed) = (exponents.shape(), exponents_shape(count));
    if found != needed {
        let problem = format!("{EXPONENTS} has the shape {found:?}, but must have {needed:?}");
        return Err(refuse(problem));
    }
    Ok(())
}

/// Refuses a state that was begun and lacks what the algorithm always keeps. One that has only a master was not.
fn check_missing<T>(
    entries: &BTreeMap<String, T>,
    algorithm: &dyn Spec,
    dims: usize,
    refuse: &dyn Fn(String) -> Error,
) -> Result<()> {
    let (plain, counts_steps) = (MomentFormat::Plain, algorithm.counts_steps());
    let described = algorithm.tensors(plain).iter().zip(algorithm.used(plain, dims));
    let needed = described.filter(|(described, used)| described.is_required && *used);
    let needed = needed.map(|(described, _)| described.key);
    let needed = needed.chain(counts_steps.then_some(STEP));
    let is_begun = entries.keys().any(|key| key != MASTER && (key != STEP || counts_steps));
    match needed.into_iter().find(|&key| is_begun && !entries.contains_key(key)) {
        Some(key) => Err(refuse(format!("has no {key}"))),
        None => Ok(()),
    }
}

/// Reads the number of steps.
fn count<T: Saved>(step: &T, refuse: &dyn Fn(String) -> Error) -> Result<f64> {
    let found = step.shape();
    if found.iter().any(|&size| size != 1) {
        return Err(refuse(format!("{STEP} has the shape {found:?}, but must have one element")));
    }
    let value = step.item()?;
    if !(0.0..=MOST_STEPS).contains(&value) {
        let (value, most) = (Number(value), Number(MOST_STEPS));
        let problem =
            format!("{STEP} is {value}, but must be finite, at least 0 and at most {most}");
        return Err(refuse(problem));
    }
    Ok(value)
}

impl Optimizer {
    /// Copies the tensors, in the dtypes and to the devices of the parameters.
    fn copies<T: Saved>(
        &self,
        slots: &[Option<CheckedTensors<'_, T>>],
        algorithms: &[Algorithm],
    ) -> Result<Vec<ParameterState>> {
        let mut states: Vec<_> = slots.iter().map(|_| ParameterState::default()).collect();
        let loaded = states.iter_mut().zip(slots).zip(&self.parameters).enumerate();
        allocate_missing_state(loaded.filter_map(|(index, ((state, entries), parameter))| {
            let entries = entries.as_ref()?;
            let (kept_as, master) = (self.moments.of(parameter), self.masters.of(parameter, index));
            Some(Wanted {
                state,
                parameter,
                kept_as,
                kind: master.state_kind(),
                step: entries.step.is_some(),
                tensors: entries.kept(kept_as),
                described: algorithms[index].spec().tensors(kept_as),
                values: [0.0; KEPT],
                // If absent, the next step makes it from the parameter.
                master: if entries.master.is_some() { master } else { Master::None },
            })
        }))?;
        for (index, (state, entries)) in states.iter_mut().zip(slots).enumerate() {
            if let Some(entries) = entries {
                let parameter = &self.parameters[index];
                let kept_as = self.moments.of(parameter);
                if entries.exponents.is_some() || kept_as == MomentFormat::EightBit {
                    let betas = algorithms[index].spec().betas();
                    convert(state, entries, betas, parameter.device())?;
                } else {
                    copy(&mut state.tensors, entries.tensors)?;
                }
                finish(state, entries, parameter, self.masters.of(parameter, index))?;
            }
        }
        Ok(states)
    }
}

/// Loads moments that are in 8 bits in the saved state or here: as they are if in both, and else by way of f32.
fn convert<T: Saved>(
    state: &mut ParameterState,
    entries: &CheckedTensors<'_, T>,
    betas: (f64, f64),
    device: Device,
) -> Result<()> {
    let [Some(exp_avg), Some(exp_avg_sq), maximum] = entries.tensors else { return Ok(()) };
    let _own = OutsideRegions::enter();
    let is_coded = matches!(&state.tensors[0], Some(kept) if kept.kind() == Kind::Int8);
    if is_coded && let Some(exponents) = entries.exponents {
        // As they are, also those that were made with other betas.
        return copy(&mut state.tensors, [Some(exp_avg), Some(exp_avg_sq), Some(exponents)]);
    }
    let read = |saved: &T, kind| {
        let mut tensor = Tensor::f_empty(saved.shape(), (kind, device))?;
        saved.copy_to(&mut tensor)?;
        Ok::<_, Error>(tensor)
    };
    let numbers = match entries.exponents {
        Some(exponents) => {
            let [exp_avg, exp_avg_sq] =
                [read(exp_avg, Kind::Int8)?, read(exp_avg_sq, Kind::Uint8)?];
            ffi::codes_decode([&exp_avg, &exp_avg_sq, &read(exponents, Kind::Uint8)?])?
        }
        None => [read(exp_avg, Kind::Float)?, read(exp_avg_sq, Kind::Float)?],
    };
    match &mut state.tensors {
        [Some(exp_avg), Some(exp_avg_sq), Some(exponents)] if is_coded => {
            ffi::codes_encode(numbers.each_ref(), betas, [exp_avg, exp_avg_sq, exponents])
        }
        kept => {
            copy(&mut kept[2..], [maximum, None, None])?;
            copy(kept, [Some(&numbers[0]), Some(&numbers[1]), None])
        }
    }
}

/// Copies tensors into the places that there are for them.
fn copy<T: Saved>(kept: &mut [Option<Tensor>], loaded: [Option<&T>; KEPT]) -> Result<()> {
    for (kept, loaded) in kept.iter_mut().zip(loaded) {
        if let (Some(kept), Some(loaded)) = (kept, loaded) {
            loaded.copy_to(kept)?;
        }
    }
    Ok(())
}

/// Loads what a parameter's state has beside its moments.
fn finish<T: Saved>(
    state: &mut ParameterState,
    entries: &CheckedTensors<'_, T>,
    parameter: &Tensor,
    master: Master,
) -> Result<()> {
    if let (Some(kept), Some(loaded)) = (&mut state.step, entries.step) {
        loaded.copy_to(kept)?;
    }
    if let Some(loaded) = entries.master {
        load_master(state, loaded, parameter, master)?;
    }
    state.most_steps = entries.most_steps;
    // Without a momentum buffer, the next gradient starts one.
    let started = entries.tensors.iter().any(Option::is_some);
    state.first_step = if started { FirstStep::Taken } else { FirstStep::Ahead };
    Ok(())
}

fn load_master<T: Saved>(
    state: &mut ParameterState,
    loaded: &T,
    parameter: &Tensor,
    master: Master,
) -> Result<()> {
    match (master, &mut state.master) {
        // The parameter has no room for what the random rounding has left of it.
        (Master::Stochastic { .. }, _) => Ok(()),
        (Master::Float, Some(kept)) => loaded.copy_to(kept),
        _ => {
            let kind = if parameter.kind() == Kind::Double { Kind::Double } else { Kind::Float };
            let mut numbers = Tensor::f_empty(parameter.size(), (kind, parameter.device()))?;
            loaded.copy_to(&mut numbers)?;
            state.loaded = Some(numbers);
            Ok(())
        }
    }
}

/// The memory of an optimizer's state, by [`Optimizer::memory_usage`]; `Display` prints it as one line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryUsage {
    /// The elements of the parameters that have a state here.
    pub elements: u64,
    /// The bytes of the moments, or of what other algorithms keep in their place.
    pub moment_bytes: u64,
    /// The bytes of the master weights or their remainders.
    pub master_bytes: u64,
    /// The elements whose moments are in 8 bits.
    pub in_eight_bits: u64,
    /// Those of them whose second moment is stored as the lowest value of their block's window, about 2^-31 of the
    /// block's largest. If the exact one is smaller, the updates are too small. Elements that never had a gradient,
    /// such as unused rows of an embedding, are counted, too, and lose nothing.
    pub below_window: u64,
}

impl fmt::Display for MemoryUsage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { elements, moment_bytes, master_bytes, in_eight_bits, below_window } = *self;
        let each = |bytes: u64| bytes as f64 / elements.max(1) as f64;
        write!(
            f,
            "{elements} elements: moments {moment_bytes} bytes, {:.2} each; master weights {master_bytes} bytes, {:.2} \
             each",
            each(moment_bytes),
            each(master_bytes)
        )?;
        if in_eight_bits > 0 {
            let share = 100.0 * below_window as f64 / in_eight_bits as f64;
            write!(
                f,
                "; {share:.3} % of the 8-bit second moments are at the bottom of their window"
            )?;
        }
        Ok(())
    }
}

impl Optimizer {
    /// Reports how many bytes the optimizer's state takes, and how many 8-bit second moments are at the bottom of their
    /// block's window. Parameters that were not stepped yet are not counted, nor are step counts. If the state is
    /// divided among ranks, the report is of this rank. Synchronizes once for each parameter with 8-bit moments.
    /// PyTorch has no counterpart.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if libtorch fails.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Kind, Tensor};
    /// use tch_amp::optim::{AdamW, MomentDtype};
    ///
    /// let w = Tensor::ones([64, 64], (Kind::Float, tch::Device::Cpu)).set_requires_grad(true);
    /// let mut opt = AdamW::default().moments(MomentDtype::EightBit).build(&[w.shallow_clone()], 1e-3)?;
    /// opt.backward_step(&w.sum(Kind::Float))?;
    /// let report = opt.memory_usage()?;
    /// assert_eq!(report.moment_bytes, 64 * 64 * 2 + 64 * 64 / 32);
    /// assert_eq!(report.below_window, 0);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn memory_usage(&self) -> Result<MemoryUsage> {
        let _own = OutsideRegions::enter();
        let bytes = |tensor: &Tensor| {
            (ffi::numel(tensor).saturating_mul(tensor.kind().elt_size_in_bytes())) as u64
        };
        let mut report = MemoryUsage::default();
        for (slot, parameter) in self.slots.iter().zip(&self.parameters) {
            let kept: Vec<_> = slot.state.tensors.iter().flatten().collect();
            if kept.is_empty() && slot.state.master.is_none() {
                continue;
            }
            let elements = ffi::numel(parameter) as u64;
            report.elements += elements;
            report.moment_bytes += kept.iter().map(|tensor| bytes(tensor)).sum::<u64>();
            report.master_bytes += slot.state.master.as_ref().map_or(0, bytes);
            if let (MomentFormat::EightBit, [_, exp_avg_sq, _]) =
                (self.moments.of(parameter), &kept[..])
            {
                let lowest = exp_avg_sq.f_logical_not()?.f_sum(Kind::Int64)?.f_int64_value(&[])?;
                report.in_eight_bits += elements;
                report.below_window += lowest.unsigned_abs();
            }
        }
        Ok(report)
    }
}

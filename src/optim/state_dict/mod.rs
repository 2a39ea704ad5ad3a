//! Saving and loading the state of an optimizer.

mod load;

use std::collections::{BTreeMap, BTreeSet};

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use tch::Tensor;

use crate::error::Result;
use crate::optim::algorithm::OptionFields;
use crate::optim::masters::MASTER;
use crate::optim::shards::Shards;
use crate::optim::state::{STEP, State, keys};
use crate::optim::{Algorithm, Optimizer, ParamGroup};

pub(crate) use load::{Loaded, Saved};

/// The complete state of an optimizer, from which training resumes as if it had not been interrupted. The counterpart
/// of what PyTorch's `state_dict` returns, with parameter names instead of numbers.
#[derive(Debug)]
#[non_exhaustive]
pub struct OptimizerState {
    /// The tensors of each parameter that has been stepped (with Adagrad, of all parameters), under PyTorch's keys:
    /// `step` (f32, 0-dim) and, in the parameter's shape, `exp_avg`, `exp_avg_sq` and `max_exp_avg_sq` of Adam,
    /// `momentum_buffer` of SGD and Muon, `sum` of Adagrad, `square_avg`, `momentum_buffer` and `grad_avg` of RMSprop, or `exp_avg`
    /// of Lion; with [`MasterWeights`](crate::optim::MasterWeights) also `master_param`, in f32.
    pub state: BTreeMap<String, BTreeMap<String, Tensor>>,
    /// The groups, in order.
    pub param_groups: Vec<ParamGroupState>,
}

/// The saved form of a parameter group.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ParamGroupState {
    /// The options of the group.
    #[serde(flatten)]
    pub options: ParamGroup,
    /// The names of its parameters.
    pub params: Vec<String>,
}

impl OptimizerState {
    /// Makes a state, for example of one in another format, to be loaded with
    /// [`load_state_dict`](Optimizer::load_state_dict), which checks it.
    pub fn new(
        state: BTreeMap<String, BTreeMap<String, Tensor>>,
        param_groups: Vec<ParamGroupState>,
    ) -> Self {
        Self { state, param_groups }
    }
}

impl ParamGroupState {
    /// Makes the saved form of a group.
    pub fn new(options: ParamGroup, params: Vec<String>) -> Self {
        Self { options, params }
    }
}

impl<'de> Deserialize<'de> for ParamGroupState {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let mut fields = OptionFields::deserialize(deserializer)?;
        // Taken out first: there may be far more parameters than options, which are copied.
        let params = fields.remove("params").ok_or_else(|| D::Error::missing_field("params"))?;
        let state = || {
            Ok(Self {
                options: ParamGroup::read(&fields)?,
                params: serde_json::from_value(params)?,
            })
        };
        state().map_err(|error: serde_json::Error| D::Error::custom(error))
    }
}

impl Optimizer {
    /// The names of the parameters in each group, in order. For Muon, those that it steps come first.
    pub(crate) fn state_names(&self) -> Vec<Vec<String>> {
        let mut names = vec![Vec::new(); self.groups.len()];
        for by_adamw in [false, true] {
            for slot in &self.slots {
                let algorithm = &self.groups[slot.group].algorithm;
                if algorithm.leaves_to_adamw(slot.is_matrix) == by_adamw {
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
    /// [`OptimizerError::Parameter`](crate::optim::OptimizerError::Parameter) for a variable that was added to the `VarStore`
    /// and cannot be taken up; [`Error::Torch`](crate::Error::Torch) if libtorch fails.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, nn};
    /// use tch_amp::optim::Sgd;
    ///
    /// let vs = nn::VarStore::new(Device::Cpu);
    /// let w = vs.root().var("w", &[1], nn::Init::Const(4.0));
    /// let mut opt = Sgd::default().momentum(0.9).build(&vs, 0.25)?;
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

    /// Returns the state, without the tensors that other ranks keep.
    fn state_here(&mut self) -> Result<OptimizerState> {
        self.take_added()?;
        self.renew_known_masters()?;
        self.settle_loaded_masters()?;
        if let Algorithm::Adagrad(_) = self.groups[0].algorithm {
            // PyTorch makes the sums with the optimizer, and requires them for every parameter.
            let here = (0..self.slots.len()).filter(|&index| !self.slots[index].elsewhere);
            self.complete(&here.collect::<Vec<_>>())?;
        }
        let groups = self.groups.iter().map(|&options| ParamGroupState { options, params: vec![] });
        let mut param_groups: Vec<_> = groups.collect();
        let mut state = BTreeMap::new();
        for (index, slot) in self.slots.iter_mut().enumerate() {
            param_groups[slot.group].params.push(slot.name.clone());
            let algorithm = self.groups[slot.group].algorithm.of(slot.is_matrix);
            // A momentum buffer that is not in use yet is not saved.
            let unused =
                matches!(algorithm, Algorithm::Sgd(_)) && slot.state.first_step.is_ahead()?;
            let parameter = &self.parameters[index];
            let master = self.masters.of(parameter, index);
            let numbers = |state: &State| master.numbers(parameter, state);
            let entries = entries(&slot.state, &algorithm, unused, numbers)?;
            if !entries.is_empty() {
                state.insert(slot.name.clone(), entries);
            }
        }
        Ok(OptimizerState { state, param_groups })
    }
}

fn entries(
    state: &State,
    algorithm: &Algorithm,
    unused: bool,
    numbers: impl Fn(&State) -> Result<Option<Tensor>>,
) -> Result<BTreeMap<String, Tensor>> {
    let step = state.step.iter().map(|step| (STEP, step));
    let tensors = keys(algorithm).iter().copied().zip(&state.tensors);
    let tensors = tensors.filter_map(|(key, tensor)| Some((key, tensor.as_ref()?)));
    let tensors = step.chain(tensors.filter(|_| !unused));
    let mut entries: BTreeMap<_, _> =
        tensors.map(|(key, tensor)| (key.to_owned(), tensor.shallow_clone())).collect();
    if let Some(numbers) = numbers(state)? {
        entries.insert(MASTER.to_owned(), numbers);
    }
    Ok(entries)
}

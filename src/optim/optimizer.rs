//! The fused optimizer.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use tch::Tensor;

#[cfg(doc)]
use crate::error::GradientError;
use crate::error::{Error, OptimizerError, ParameterProblem, Result, ensure_defined};
use crate::gradients::{ClipNorm, clip_grad_norm, clip_grad_value};
#[cfg(doc)]
use crate::optim::AdamW;
use crate::optim::algorithms::{self, each_algorithm};
use crate::optim::parameters::{Named, Source, TrackedVariables};
use crate::optim::rates::DeviceRates;
use crate::optim::shards::Shards;
use crate::optim::state::ParameterState;
use crate::optim::{
    Algorithm, AmpOptimizer, IntoParameters, MasterWeights, MomentDtype, ParamGroup, Parameters,
    Step, drop_gradients, take_step,
};
use crate::patterns::matches_any;
use crate::variables::Names;
use crate::{capture, ffi};

/// An optimizer whose step is one call for all parameters. It is built by [`AdamW`](crate::optim::AdamW),
/// [`Adam`](crate::optim::Adam), [`Sgd`](crate::optim::Sgd), [`Adagrad`](crate::optim::Adagrad),
/// [`RmsProp`](crate::optim::RmsProp), [`NAdam`](crate::optim::NAdam), [`Adafactor`](crate::optim::Adafactor),
/// [`Lion`](crate::optim::Lion) or [`Muon`](crate::optim::Muon). The counterpart of `torch.optim.Optimizer` with
/// `fused=True`, with the methods of `tch::nn::Optimizer`.
///
/// Parameters may be f32, f64, bf16 or fp16, on any device. The state of a parameter has the parameter's dtype, except
/// for `step`, which is f32 (i64 with low-bit moments), and unless [`MasterWeights`] keep the state in f32 or
/// [`MomentDtype`] in fewer bits. Methods that synchronize say so. In addition, the step of an SGD with momentum and
/// dampening that a scaler steps on a GPU synchronizes until the first of its steps is known to have been taken.
///
/// # Examples
///
/// ```
/// use tch::{Device, nn};
/// use tch_amp::optim::Sgd;
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let w = vs.root().var("w", &[1], nn::Init::Const(4.0));
/// let mut opt = Sgd::default().build(&vs, 0.25)?;
/// for _ in 0..3 {
///     let loss = w.square().sum(None);
///     opt.backward_step(&loss)?;
/// }
/// assert_eq!(w.double_value(&[0]), 0.5);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Debug)]
pub struct Optimizer {
    pub(crate) groups: Vec<ParamGroup>,
    pub(super) rules: Vec<GroupRule>,
    store: Option<TrackedVariables>,
    pub(super) parameters: Vec<Tensor>,
    /// One for each parameter.
    pub(super) slots: Vec<Slot>,
    /// The identities of the parameters.
    known: HashSet<usize>,
    pub(super) masters: MasterWeights,
    pub(super) moments: MomentDtype,
    /// The versions of the parameters when their masters last matched them.
    pub(super) stamps: ffi::Stamps,
    /// Whether the gradients of half-precision parameters are f32.
    pub(super) f32_gradients: bool,
    /// The ranks over which the state is divided.
    pub(super) shards: Option<Box<Shards>>,
    /// Shared with the graphs that have captured its steps.
    pub(super) rates: Option<Arc<DeviceRates>>,
}

/// Groups are kept in a list, so their numbers have to be small.
const LARGEST_GROUP: usize = 65535;

/// The name, the group and the state of a parameter.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) name: String,
    /// Its other names, if it has several.
    pub(super) aliases: Vec<String>,
    pub(super) group: usize,
    /// The number of its dimensions.
    pub(super) dims: usize,
    pub(super) state: ParameterState,
    /// Whether another rank keeps the state and steps the parameter.
    pub(super) owned_by_other_rank: bool,
}

impl Slot {
    /// All names of the parameter.
    pub(super) fn names(&self) -> impl Iterator<Item = &String> {
        std::iter::once(&self.name).chain(&self.aliases)
    }
}

/// Assigns the parameters whose names match one of the patterns to a group.
#[derive(Debug)]
pub(super) struct GroupRule {
    pub(super) patterns: Vec<String>,
    pub(super) group: usize,
}

impl GroupRule {
    /// Returns whether one of the names of a parameter matches.
    pub(super) fn matches(&self, slot: &Slot) -> bool {
        slot.names().any(|name| matches_any(&self.patterns, name))
    }
}

impl Optimizer {
    fn new(
        algorithm: Algorithm,
        parameters: impl IntoParameters,
        lr: f64,
        masters: MasterWeights,
        moments: MomentDtype,
    ) -> Result<Self> {
        algorithm.check(lr)?;
        moments.check(&algorithm)?;
        let mut optimizer = Self {
            groups: vec![ParamGroup { lr, algorithm }],
            rules: Vec::new(),
            store: None,
            parameters: Vec::new(),
            slots: Vec::new(),
            known: HashSet::new(),
            masters,
            moments,
            stamps: ffi::Stamps::default(),
            f32_gradients: false,
            shards: None,
            rates: None,
        };
        match parameters.into_parameters().0 {
            Source::VarStore(store) => {
                optimizer.store = Some(store);
                optimizer.take_added()?;
            }
            origin => match origin.parameters(0)? {
                list if list.is_empty() => {
                    return Err(Error::Optimizer(OptimizerError::NoParameters));
                }
                list => optimizer.add(list)?,
            },
        }
        Ok(optimizer)
    }

    /// Adds parameters in a new group with the options of group 0, and returns the number of the group. Variables that
    /// are added to the optimizer's `VarStore` need no call. The counterpart of `add_param_group`.
    ///
    /// # Errors
    ///
    /// [`OptimizerError::Parameter`] for a tensor that is not a floating-point tensor, that is not a leaf, or that the
    /// optimizer already has; [`OptimizerError::SharedMemory`] for one that shares memory with another. Then none is
    /// added.
    pub fn add_param_group(&mut self, parameters: impl IntoParameters) -> Result<usize> {
        let group = self.groups.len();
        let list = parameters.into_parameters().0.parameters(group)?;
        self.add(list.into_iter().map(|named| Named { group, ..named }).collect())?;
        self.make_groups(group);
        Ok(group)
    }

    /// Takes up the variables that were added to the `VarStore`.
    pub(crate) fn take_added(&mut self) -> Result<()> {
        let (added, count) = match &self.store {
            Some(store) if store.has_more() => store.added(&self.known)?,
            _ => return Ok(()),
        };
        self.add(added)?;
        if let Some(store) = &mut self.store {
            store.taken(count);
        }
        Ok(())
    }

    /// Reads the names that variables of the `VarStore` have by now: one may have been inserted under another since.
    pub(crate) fn take_names(&mut self) -> Result<()> {
        let Some(store) = &self.store else { return Ok(()) };
        let names = store.names()?;
        let identities = ffi::identities(&self.parameters)?;
        for (slot, identity) in self.slots.iter_mut().zip(identities) {
            if let Some(names) = names.get(&identity) {
                let others = names.iter().filter(|name| **name != slot.name);
                slot.aliases = others.cloned().collect();
            }
        }
        Ok(())
    }

    /// Adds all of these parameters, or none.
    fn add(&mut self, list: Vec<Named>) -> Result<()> {
        let tensors: Vec<_> = list.iter().map(|named| named.tensor.shallow_clone()).collect();
        let identities = ffi::identities(&tensors)?;
        let mut names: HashSet<_> = self.slots.iter().map(|slot| slot.name.clone()).collect();
        let mut known = self.known.clone();
        let mut added = Vec::with_capacity(list.len());
        for (named, identity) in list.into_iter().zip(identities) {
            let place = self.slots.len() + added.len();
            let Names { first: name, others: aliases } =
                named.names.unwrap_or_else(|| place.to_string().into());
            let problem = if identity == 0 || !named.tensor.is_floating_point() {
                Some(ParameterProblem::NotFloatingPoint)
            } else if named.group > LARGEST_GROUP {
                Some(ParameterProblem::GroupTooLarge)
            } else if !named.tensor.f_is_leaf()? {
                Some(ParameterProblem::NotALeaf)
            } else if !known.insert(identity) {
                Some(ParameterProblem::Twice)
            } else if !names.insert(name.clone()) {
                Some(ParameterProblem::NameTaken)
            } else {
                self.moments.problem(&named.tensor, self.masters)
            };
            if let Some(problem) = problem {
                return Err(Error::Optimizer(OptimizerError::Parameter {
                    parameter: name,
                    problem,
                }));
            }
            added.push((name, aliases, named.tensor, named.group));
        }
        self.refuse_overlapping(added.iter().map(|(name, _, tensor, _)| (name, tensor)))?;
        match self.masters {
            // An optimizer with master weights may have made them f32.
            MasterWeights::None => ffi::gradients_narrow(&tensors)?,
            _ if self.f32_gradients => drop(ffi::gradients_widen(&tensors)?),
            _ => {}
        }
        self.take_rates_back()?;
        self.known = known;
        self.note_change("the parameters of the optimizer");
        for (name, aliases, tensor, group) in added {
            let (dims, state) = (tensor.dim(), ParameterState::default());
            let mut slot = Slot { name, aliases, group, dims, state, owned_by_other_rank: false };
            let ruled = self.rules.iter().rev().find(|rule| rule.matches(&slot));
            slot.group = ruled.map_or(group, |rule| rule.group);
            self.make_groups(slot.group);
            self.parameters.push(tensor);
            self.slots.push(slot);
        }
        self.divide();
        Ok(())
    }

    /// Refuses parameters that have memory in common with each other or with those that are in the optimizer.
    pub(crate) fn refuse_overlapping<'a>(
        &'a self,
        added: impl Iterator<Item = (&'a String, &'a Tensor)>,
    ) -> Result<()> {
        let known = self.slots.iter().zip(&self.parameters);
        let all = known.map(|(slot, tensor)| (&slot.name, tensor)).chain(added);
        let (names, tensors): (Vec<_>, Vec<_>) =
            all.map(|(name, tensor)| (name, tensor.shallow_clone())).unzip();
        match ffi::overlapping(&tensors)? {
            Some((one, other)) => Err(Error::Optimizer(OptimizerError::SharedMemory {
                parameter: names[one].clone(),
                other: names[other].clone(),
            })),
            None => Ok(()),
        }
    }

    /// Refuses a parameter that cannot have moments in the mode of this optimizer, by its dtype now.
    pub(crate) fn check_states(&self, index: usize) -> Result<()> {
        let parameter = self.slots[index].name.clone();
        match self.moments.problem(&self.parameters[index], self.masters) {
            Some(problem) => {
                Err(Error::Optimizer(OptimizerError::Parameter { parameter, problem }))
            }
            None => Ok(()),
        }
    }

    /// Returns the parameters, including those that were added to the `VarStore` since the last call.
    pub fn trainable_variables(&self) -> Vec<Tensor> {
        self.parameters().into_owned()
    }

    /// Drops the gradients of all parameters. Corresponds to `zero_grad(set_to_none=True)` in PyTorch, its default.
    /// Without master weights, later gradients have the dtypes of their parameters, even if another optimizer has them
    /// [accumulated in f32](Self::accumulate_in_f32).
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if libtorch fails.
    pub fn zero_grad(&mut self) -> Result<()> {
        drop_gradients(self)
    }

    /// Clips the gradients of all parameters to a common norm, like
    /// [`clip_grad_norm`](crate::gradients::clip_grad_norm). With a scaler, unscale them first, or use
    /// [`GradScaler::step_clip_norm`](crate::GradScaler::step_clip_norm).
    ///
    /// # Errors
    ///
    /// The same as [`clip_grad_norm`](crate::gradients::clip_grad_norm).
    pub fn clip_grad_norm(&self, clip: impl Into<ClipNorm>) -> Result<Tensor> {
        clip_grad_norm(self.parameters().as_slice(), clip)
    }

    /// Clamps every element of the gradients of all parameters, like
    /// [`clip_grad_value`](crate::gradients::clip_grad_value).
    ///
    /// # Errors
    ///
    /// The same as [`clip_grad_value`](crate::gradients::clip_grad_value).
    pub fn clip_grad_value(&self, max: f64) -> Result<()> {
        clip_grad_value(self.parameters().as_slice(), max)
    }

    /// Updates the parameters from their gradients, which stay unchanged. Parameters without a gradient and frozen ones
    /// are left out. The counterpart of `step`. With a scaler, call [`GradScaler::step`](crate::GradScaler::step)
    /// instead.
    ///
    /// # Errors
    ///
    /// [`GradientError::Unsupported`] for a sparse gradient, or one that lacks its parameter's shape, device or dtype;
    /// [`OptimizerError::SharedMemory`] for parameters that have come to share memory; [`OptimizerError::Parameter`]
    /// for a variable that was added to the `VarStore` and cannot be taken up, or whose dtype changed since its master
    /// weight was made, or for a parameter that is no longer a leaf; [`Error::Torch`] for another parameter whose dtype
    /// or device changed, and if a GPU runs out of memory. Nothing is changed then, on any device, and the step can be
    /// tried again.
    pub fn step(&mut self) -> Result<()> {
        take_step(self, &Step::default())
    }

    /// Drops the gradients, runs backward on the loss, and steps.
    ///
    /// It does not use a scaler: with one, call
    /// [`GradScaler::backward_step`](crate::GradScaler::backward_step) instead.
    ///
    /// # Errors
    ///
    /// The same as [`step`](Self::step), [`Error::InvalidArgument`] for an undefined loss, before the gradients are
    /// dropped, and [`Error::Torch`] if backward fails.
    pub fn backward_step(&mut self, loss: &Tensor) -> Result<()> {
        ensure_defined("loss", loss)?;
        self.zero_grad()?;
        loss.f_backward()?;
        self.step()
    }

    /// Drops the gradients, runs backward on the loss, clamps every element of the gradients to `-max..=max`, and
    /// steps.
    ///
    /// It does not use a scaler: with one, call
    /// [`GradScaler::backward_step_clip_value`](crate::GradScaler::backward_step_clip_value) instead.
    ///
    /// # Errors
    ///
    /// The same as [`backward_step`](Self::backward_step) and [`clip_grad_value`](Self::clip_grad_value).
    pub fn backward_step_clip(&mut self, loss: &Tensor, max: f64) -> Result<()> {
        ensure_defined("loss", loss)?;
        self.zero_grad()?;
        loss.f_backward()?;
        self.clip_grad_value(max)?;
        self.step()
    }

    /// Drops the gradients, runs backward on the loss, clips the gradients to a common norm of at most `clip`, such as
    /// a number for the 2-norm, and steps.
    ///
    /// It does not use a scaler: with one, call
    /// [`GradScaler::backward_step_clip_norm`](crate::GradScaler::backward_step_clip_norm) instead.
    ///
    /// # Errors
    ///
    /// The same as [`backward_step`](Self::backward_step) and [`clip_grad_norm`](Self::clip_grad_norm).
    pub fn backward_step_clip_norm(
        &mut self,
        loss: &Tensor,
        clip: impl Into<ClipNorm>,
    ) -> Result<()> {
        ensure_defined("loss", loss)?;
        self.zero_grad()?;
        loss.f_backward()?;
        let _norm = self.clip_grad_norm(clip)?;
        self.step()
    }
}

impl AmpOptimizer for Optimizer {
    /// Returns all parameters, including those that were added to the `VarStore` since the last step.
    fn parameters(&self) -> Parameters<'_> {
        match &self.store {
            Some(store) if store.has_more() => {
                let known = self.parameters.iter().map(Tensor::shallow_clone);
                known.chain(store.more(&self.known)).collect::<Vec<_>>().into()
            }
            _ => self.parameters.as_slice().into(),
        }
    }

    fn update(&mut self, step: &Step<'_>) -> Result<()> {
        self.run(step)
    }

    fn takes_scaled_gradients(&self) -> bool {
        true
    }

    fn wants_f32_gradients(&self) -> bool {
        self.masters != MasterWeights::None
    }

    /// Returns the tensors of [`state_dict`](Self::state_dict).
    fn state_tensors(&mut self) -> Result<Vec<BTreeMap<String, Tensor>>> {
        let mut state = self.state_dict()?.state;
        Ok(self.slots.iter().map(|slot| state.remove(&slot.name).unwrap_or_default()).collect())
    }

    fn parameter_name(&self, index: usize) -> Option<String> {
        self.slots.get(index).map(|slot| slot.name.clone())
    }
}

/// Builds an optimizer with options beyond those of its [`Algorithm`]: the modes of its master weights and of its
/// moments.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use = "an optimizer is made by `build`"]
pub struct OptimizerBuilder {
    algorithm: Algorithm,
    masters: MasterWeights,
    moments: MomentDtype,
}

impl OptimizerBuilder {
    /// Makes the optimizer update half-precision parameters in f32, in the given mode.
    pub fn master_weights(self, masters: MasterWeights) -> Self {
        Self { masters, ..self }
    }

    /// Sets how Adam, AdamW or Muon stores its moments, for example in 8 bits.
    pub fn moments(self, moments: MomentDtype) -> Self {
        Self { moments, ..self }
    }

    /// Makes the optimizer, like [`AdamW::build`].
    ///
    /// # Errors
    ///
    /// The same as [`AdamW::build`], and [`Error::InvalidArgument`] for [`MomentDtype`] that the algorithm does not
    /// support; [`OptimizerError::Parameter`] with [`ParameterProblem::NoLowBitMoments`] for a parameter whose dtype or
    /// device does not allow them.
    pub fn build(self, parameters: impl IntoParameters, lr: f64) -> Result<Optimizer> {
        Optimizer::new(self.algorithm, parameters, lr, self.masters, self.moments)
    }
}

impl Algorithm {
    /// Makes an optimizer without master weights, like [`AdamW::build`].
    ///
    /// # Errors
    ///
    /// The same as [`AdamW::build`].
    pub fn build(self, parameters: impl IntoParameters, lr: f64) -> Result<Optimizer> {
        self.master_weights(MasterWeights::None).build(parameters, lr)
    }

    /// Makes the optimizer update half-precision parameters in f32, in the given mode.
    pub fn master_weights(self, masters: MasterWeights) -> OptimizerBuilder {
        OptimizerBuilder { algorithm: self, masters, moments: MomentDtype::F32 }
    }
}

macro_rules! build {
    ($($config:ident $torch:literal)*) => {$(
        impl algorithms::$config {
            /// Makes an optimizer with the learning rate `lr` for the trainable variables of a `VarStore`, or for a
            /// list of tensors with or without names, in any of the forms of [`IntoParameters`].
            ///
            /// Tensors of a list that do not require a gradient are kept but not updated, like frozen parameters.
            ///
            /// The variables of a `VarStore` belong to the groups that their paths were given
            /// ([`set_group`](tch::nn::Path::set_group)). Variables that are added to it later are taken up as well.
            ///
            /// # Errors
            ///
            /// [`Error::InvalidArgument`] for an option or a learning rate outside its range;
            /// [`OptimizerError::SharedMemory`] for two tensors that share memory; [`OptimizerError::Parameter`] for a
            /// tensor that is not a floating-point tensor, is not a leaf or is listed twice;
            /// [`OptimizerError::NoParameters`] for an empty list.
            pub fn build(self, parameters: impl IntoParameters, lr: f64) -> Result<Optimizer> {
                Algorithm::from(self).build(parameters, lr)
            }

            /// Sets how the optimizer updates half-precision parameters. Set the options of the algorithm before: the
            /// builder that is returned does not have them.
            pub fn master_weights(self, masters: MasterWeights) -> OptimizerBuilder {
                Algorithm::from(self).master_weights(masters)
            }
        }
    )*};
}

each_algorithm!(build);

macro_rules! moments {
    ($($config:ident)*) => {$(
        impl algorithms::$config {
            /// Sets how the optimizer stores its moments, for example in bf16. Set the algorithm's own options first:
            /// the builder that is returned has no methods for them.
            pub fn moments(self, moments: MomentDtype) -> OptimizerBuilder {
                Algorithm::from(self).master_weights(MasterWeights::None).moments(moments)
            }
        }
    )*};
}

moments!(AdamW Adam Muon);

/// Changes of groups, which an iteration of a graph cannot make.
const SET: &str = "a change of the optimizer's options";
const OUTSIDE: &str = "make it before `replay`: replays read the learning rates of their time";

impl Optimizer {
    /// Returns the options of a group. Corresponds to `optimizer.param_groups[group]` in PyTorch.
    ///
    /// # Errors
    ///
    /// [`OptimizerError::NoSuchGroup`].
    pub fn param_group(&self, group: usize) -> Result<&ParamGroup> {
        let groups = self.groups.len();
        self.groups
            .get(group)
            .ok_or(Error::Optimizer(OptimizerError::NoSuchGroup { group, groups }))
    }

    /// Returns the number of groups, at least 1.
    pub fn param_group_count(&self) -> usize {
        self.groups.len()
    }

    /// Replaces the options of a group. A parameter that moves between Muon and its AdamW thereby starts with a new
    /// state.
    ///
    /// # Errors
    ///
    /// [`OptimizerError::NoSuchGroup`]; [`Error::InvalidArgument`] for a value outside its range, or for `amsgrad` with
    /// low-bit moments; [`OptimizerError::OtherAlgorithm`]. The old options are kept then.
    pub fn set_param_group(&mut self, group: usize, options: ParamGroup) -> Result<()> {
        self.change(Some(group), |old| {
            *old = options;
            Ok(())
        })
    }

    /// Moves the parameters whose names match one of the patterns to a group, including those that are added later, and
    /// returns how many match now. If `group` is the number of groups, a new one is made with the options of group 0. A
    /// `*` matches any characters. If several calls match a parameter, the last one counts. A parameter with several
    /// names, such as a tied weight, matches by any of them. Parameters from a list without names are called `"0"`,
    /// `"1"` and so on.
    ///
    /// # Errors
    ///
    /// [`OptimizerError::NoSuchGroup`] if `group` is more than the number of groups; [`OptimizerError::Parameter`] for
    /// a variable that was added to the `VarStore` and cannot be taken up.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, nn};
    /// use tch_amp::optim::AdamW;
    ///
    /// let vs = nn::VarStore::new(Device::Cpu);
    /// let _net = nn::linear(vs.root() / "linear", 4, 2, Default::default());
    /// let mut opt = AdamW::default().build(&vs, 1e-3)?;
    /// assert_eq!(opt.assign_group(1, &["*.bias", "*norm*"])?, 1);
    /// opt.set_weight_decay_group(1, 0.0)?;
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn assign_group(&mut self, group: usize, patterns: &[&str]) -> Result<usize> {
        self.take_added()?;
        self.take_names()?;
        let groups = self.groups.len();
        if group > groups {
            return Err(Error::Optimizer(OptimizerError::NoSuchGroup { group, groups }));
        }
        self.take_rates_back()?;
        self.make_groups(group);
        let patterns = patterns.iter().map(|&pattern| pattern.to_owned()).collect();
        let rule = GroupRule { patterns, group };
        let moved = self.regroup(|optimizer| {
            let slots = optimizer.slots.iter_mut().filter(|slot| rule.matches(slot));
            slots.map(|slot| slot.group = group).count()
        });
        self.rules.push(rule);
        self.note_change("the groups of the optimizer");
        Ok(moved)
    }

    /// Makes the groups up to `group`.
    pub(crate) fn make_groups(&mut self, group: usize) {
        let first = self.groups[0];
        self.groups.resize(self.groups.len().max(group + 1), first);
    }

    /// Returns the learning rate of a group.
    ///
    /// # Errors
    ///
    /// [`OptimizerError::NoSuchGroup`].
    pub fn lr(&self, group: usize) -> Result<f64> {
        Ok(self.param_group(group)?.lr)
    }

    /// Sets the learning rate of all groups. Synchronizes if a schedule in an iteration of a graph has set it.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] unless it is finite and at least 0; the old value is kept then.
    pub fn set_lr(&mut self, lr: f64) -> Result<()> {
        self.change(None, |options| set(&mut options.lr, lr))
    }

    /// Sets the learning rate of a group.
    ///
    /// # Errors
    ///
    /// [`OptimizerError::NoSuchGroup`]; otherwise the same as [`set_lr`](Self::set_lr).
    pub fn set_lr_group(&mut self, group: usize, lr: f64) -> Result<()> {
        self.change(Some(group), |options| set(&mut options.lr, lr))
    }

    /// Sets the momentum of all groups: for Adam, AdamW, NAdam and Lion the first beta, as in tch; for Muon its own, not
    /// that of its AdamW.
    ///
    /// # Errors
    ///
    /// [`OptimizerError::NoSuchOption`] for Adagrad and Adafactor; [`Error::InvalidArgument`] for a value outside its range. The old
    /// value is kept then.
    pub fn set_momentum(&mut self, momentum: f64) -> Result<()> {
        self.change(None, |options| set_momentum(options, momentum))
    }

    /// Sets the momentum of a group, like [`set_momentum`](Self::set_momentum).
    ///
    /// # Errors
    ///
    /// [`OptimizerError::NoSuchGroup`]; otherwise the same as [`set_momentum`](Self::set_momentum).
    pub fn set_momentum_group(&mut self, group: usize, momentum: f64) -> Result<()> {
        self.change(Some(group), |options| set_momentum(options, momentum))
    }

    /// Sets the weight decay of all groups, for Muon also that of its AdamW.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] unless it is finite and at least 0; the old value is kept then.
    pub fn set_weight_decay(&mut self, weight_decay: f64) -> Result<()> {
        self.change(None, |options| {
            options.algorithm.spec_mut().set_weight_decay(weight_decay);
            Ok(())
        })
    }

    /// Sets the weight decay of a group, for Muon also that of its AdamW.
    ///
    /// # Errors
    ///
    /// [`OptimizerError::NoSuchGroup`]; otherwise the same as [`set_weight_decay`](Self::set_weight_decay).
    pub fn set_weight_decay_group(&mut self, group: usize, weight_decay: f64) -> Result<()> {
        self.change(Some(group), |options| {
            options.algorithm.spec_mut().set_weight_decay(weight_decay);
            Ok(())
        })
    }

    /// Sets the learning rate of each group, and its momentum where there is one; none if a value is refused.
    pub(crate) fn set_rates(&mut self, lrs: &[f64], momenta: &[Option<f64>]) -> Result<()> {
        self.take_rates_back()?;
        let mut groups = self.groups.clone();
        for ((options, &lr), &momentum) in groups.iter_mut().zip(lrs).zip(momenta) {
            options.lr = lr;
            if let Some(momentum) = momentum {
                set_momentum(options, momentum)?;
            }
            options.algorithm.check(lr)?;
            self.moments.check(&options.algorithm)?;
        }
        let before = std::mem::replace(&mut self.groups, groups);
        self.note_groups(&before);
        Ok(())
    }

    /// Changes one group or all of them; none if a value is refused.
    fn change(
        &mut self,
        group: Option<usize>,
        change: impl Fn(&mut ParamGroup) -> Result<()>,
    ) -> Result<()> {
        if let Some(group) = group {
            self.param_group(group)?;
        }
        capture::refuse(SET, OUTSIDE)?;
        self.take_rates_back()?;
        let mut groups = self.groups.clone();
        for (index, options) in groups.iter_mut().enumerate() {
            if group.is_none_or(|group| group == index) {
                let algorithm = options.algorithm.name();
                change(options)?;
                options.algorithm.check(options.lr)?;
                let given = options.algorithm.name();
                if given != algorithm {
                    return Err(Error::Optimizer(OptimizerError::OtherAlgorithm {
                        algorithm,
                        given,
                    }));
                }
                self.moments.check(&options.algorithm)?;
            }
        }
        let before = self.groups.clone();
        self.regroup(|optimizer| optimizer.groups = groups);
        self.note_groups(&before);
        Ok(())
    }

    /// The algorithm that steps the parameter at `index`.
    pub(crate) fn algorithm(&self, index: usize) -> Algorithm {
        let slot = &self.slots[index];
        self.groups[slot.group].algorithm.of(slot.dims)
    }

    /// Calls `change`, and drops the states of the parameters that move between Muon and AdamW by it.
    pub(crate) fn regroup<T>(&mut self, change: impl FnOnce(&mut Self) -> T) -> T {
        let by_adamw = |optimizer: &Self| -> Vec<_> {
            let slots = optimizer.slots.iter();
            let groups = &optimizer.groups;
            slots.map(|slot| groups[slot.group].algorithm.leaves_to_adamw(slot.dims)).collect()
        };
        let before = by_adamw(self);
        let changed = change(self);
        let moved = before.into_iter().zip(by_adamw(self));
        for (slot, (before, after)) in self.slots.iter_mut().zip(moved) {
            if before != after {
                slot.state.restart();
            }
        }
        changed
    }
}

fn set(option: &mut f64, value: f64) -> Result<()> {
    *option = value;
    Ok(())
}

fn set_momentum(options: &mut ParamGroup, momentum: f64) -> Result<()> {
    let algorithm = options.algorithm.name();
    let missing = Error::Optimizer(OptimizerError::NoSuchOption { option: "momentum", algorithm });
    set(options.algorithm.spec_mut().momentum_mut().ok_or(missing)?, momentum)
}

//! One scale for each loss.

use std::cell::RefCell;

use tch::nn::VarStore;
use tch::{Device, Tensor};

use crate::checkpoint::{Prepared, SaveState, SavedState, Stateful};
use crate::error::{Error, Result, ScalerError, ensure, ensure_defined};
use crate::ffi::{self, FoundInf, Gradient};
use crate::gradients::{
    ClipNorm, Gradients, IdentityMap, Plan, StashedGradients, drop_frozen, overflow,
};
use crate::optim::AmpOptimizer;
use crate::scale::{AdaptiveScale, End, LoadedState, end_all};
use crate::scaler::first_steps::FirstSteps;
use crate::scaler::record::Stage;
use crate::scaler::{GradScaler, GradScalerConfig, GradScalerState, StepOutcome};

/// Scales each of several losses by a scale of its own, so that a loss that overflows often does not lower the scale of
/// the others. The gradients of all losses add up to one step. The counterpart of `num_losses` of
/// `apex.amp.initialize`; PyTorch has none.
///
/// [`backward`](Self::backward) unscales the gradients of its loss and adds them to those of the previous losses.
/// Between it and [`step`](Self::step) the gradients are therefore unscaled and can be clipped. A step is skipped if
/// any loss overflowed, and [`update`](Self::update) backs off the scales of the overflowed losses only.
/// [`Checkpoint::add`](crate::checkpoint::Checkpoint::add) saves all of them.
///
/// # Examples
///
/// ```
/// use tch::{Device, Kind, Tensor, nn};
/// use tch_amp::optim::AdamW;
/// use tch_amp::scaler::PerLossScalers;
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let net = nn::linear(vs.root(), 4, 2, Default::default());
/// let mut opt = AdamW::default().build(&vs, 1e-2)?;
/// let mut scalers = PerLossScalers::new(Device::Cpu, 2)?;
/// for _ in 0..3 {
///     let ys = Tensor::randn([8, 4], (Kind::Float, Device::Cpu)).apply(&net);
///     opt.zero_grad()?;
///     // Both losses have the graph of `ys` in common.
///     scalers.backward_retain_graph(0, &ys.square().mean(Kind::Float), &mut opt)?;
///     scalers.backward(1, &(ys.abs().mean(Kind::Float) * 1e-3), &mut opt)?;
///     assert!(scalers.step(&mut opt)?.is_stepped()?);
///     scalers.update()?;
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct PerLossScalers {
    losses: Vec<Loss>,
    /// Checks the sums of the unscaled gradients, and steps.
    sums: GradScaler,
}

impl PerLossScalers {
    /// Makes scalers for `losses` losses with PyTorch's defaults, whose scales are on `device`, which should be the
    /// device of the losses.
    ///
    /// # Errors
    ///
    /// The same as [`with_configs`](Self::with_configs).
    pub fn new(device: Device, losses: usize) -> Result<Self> {
        Self::with_configs(device, &vec![GradScalerConfig::default(); losses])
    }

    /// Makes a scaler for each loss with its own options. If one of them is disabled, all are.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if `configs` is empty; otherwise the same as [`GradScalerConfig::build`].
    pub fn with_configs(device: Device, configs: &[GradScalerConfig]) -> Result<Self> {
        if configs.is_empty() {
            return Err(Error::out_of_range("the number of losses", 0.0, "at least 1"));
        }
        let enabled = configs.iter().all(|config| config.enabled);
        let new = |config: &GradScalerConfig| {
            let config = GradScalerConfig { enabled, ..*config };
            Ok(Loss::new(AdaptiveScale::new(device, config)?))
        };
        let losses = configs.iter().map(new).collect::<Result<_>>()?;
        let mut sums =
            if enabled { GradScaler::skip_only(device)? } else { GradScaler::disabled() };
        let warns = enabled && configs.iter().all(|config| config.warn_of_skips);
        sums.first = RefCell::new(FirstSteps::new(warns));
        Ok(Self { losses, sums })
    }

    /// Returns whether the scalers are enabled.
    pub fn is_enabled(&self) -> bool {
        self.sums.is_enabled()
    }

    /// Returns the number of losses.
    pub fn loss_count(&self) -> usize {
        self.losses.len()
    }

    /// Returns the scale of a loss; 1 if the scalers are disabled. Synchronizes like [`GradScaler::get_scale`].
    ///
    /// # Errors
    ///
    /// [`ScalerError::NoSuchLoss`]; otherwise the same as [`GradScaler::get_scale`].
    pub fn get_scale(&self, loss_id: usize) -> Result<f64> {
        Ok(self.loss(loss_id)?.scale.value()?.map_or(1.0, |value| value.scale.into()))
    }

    /// Returns the number of consecutive iterations in which a loss had a backward and no overflow; 0 if the scalers
    /// are disabled. Synchronizes like [`GradScaler::get_growth_tracker`].
    ///
    /// # Errors
    ///
    /// The same as [`get_scale`](Self::get_scale).
    pub fn get_growth_tracker(&self, loss_id: usize) -> Result<i64> {
        Ok(self.loss(loss_id)?.scale.value()?.map_or(0, |value| value.tracker.into()))
    }

    /// Returns the current options of the scaler of a loss.
    ///
    /// # Errors
    ///
    /// [`ScalerError::NoSuchLoss`].
    pub fn config(&self, loss_id: usize) -> Result<&GradScalerConfig> {
        Ok(self.loss(loss_id)?.scale.config())
    }

    /// Changes the growth factor, the backoff factor and the growth interval of the scaler of a loss to those of
    /// `config`, like the setters of [`GradScaler`]. Its other options must be the present ones.
    ///
    /// # Errors
    ///
    /// [`ScalerError::NoSuchLoss`]; [`Error::InvalidArgument`] if one of the three is outside its range or another
    /// option differs. The old options are kept then.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::Device;
    /// use tch_amp::scaler::{GradScalerConfig, PerLossScalers};
    ///
    /// let mut scalers = PerLossScalers::new(Device::Cpu, 2)?;
    /// let config = GradScalerConfig { growth_interval: 100, ..*scalers.config(1)? };
    /// scalers.set_config(1, config)?;
    /// assert_eq!([0, 1].map(|id| scalers.config(id).unwrap().growth_interval), [2000, 100]);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn set_config(&mut self, loss_id: usize, config: GradScalerConfig) -> Result<()> {
        self.loss_mut(loss_id)?.scale.set_config(config)
    }

    fn loss(&self, loss_id: usize) -> Result<&Loss> {
        let losses = self.losses.len();
        Ok(self.losses.get(loss_id).ok_or(ScalerError::NoSuchLoss { loss_id, losses })?)
    }

    fn loss_mut(&mut self, loss_id: usize) -> Result<&mut Loss> {
        let losses = self.losses.len();
        Ok(self.losses.get_mut(loss_id).ok_or(ScalerError::NoSuchLoss { loss_id, losses })?)
    }

    /// Uses the names of a `VarStore`'s variables in messages, like [`GradScaler::name_parameters`].
    ///
    /// # Errors
    ///
    /// The same as [`GradScaler::name_parameters`].
    pub fn name_parameters(&mut self, vs: &VarStore) -> Result<()> {
        self.sums.name_parameters(vs)
    }

    /// Scales a loss, runs backward on it, unscales the gradients of the optimizer's parameters and adds them to the
    /// gradients that these had before. Call it once for each loss, or several times for one loss of several
    /// micro-batches. Synchronizes like [`GradScaler::unscale_`].
    ///
    /// Parameters in the graph that do not belong to the optimizer get scaled gradients: detach them or zero those
    /// gradients, and do not use the gradients that a loss leaves in another optimizer. During the call it needs memory
    /// for a second set of gradients.
    ///
    /// # Errors
    ///
    /// [`ScalerError::NoSuchLoss`]; [`ScalerError::AlreadyStepped`] between `step` and `update`; the errors of
    /// [`GradScaler::backward`] and [`GradScaler::unscale_`]. After an error or a panic the optimizer's gradients are
    /// those from before the call.
    pub fn backward(
        &mut self,
        loss_id: usize,
        loss: &Tensor,
        optimizer: &mut dyn AmpOptimizer,
    ) -> Result<()> {
        self.add(loss_id, loss, optimizer, false)
    }

    /// Runs [`backward`](Self::backward) and keeps the graph for another loss that shares a part of it. Corresponds to
    /// `backward(retain_graph=True)` in PyTorch; tch has no counterpart.
    ///
    /// # Errors
    ///
    /// The same as [`backward`](Self::backward).
    pub fn backward_retain_graph(
        &mut self,
        loss_id: usize,
        loss: &Tensor,
        optimizer: &mut dyn AmpOptimizer,
    ) -> Result<()> {
        self.add(loss_id, loss, optimizer, true)
    }

    /// Begins anew if the capture of an iteration has failed.
    fn forget_failed_capture(&mut self) {
        let numbers = self.losses.iter().map(|loss| &loss.scale).chain([&self.sums.scale]);
        // Each of them has to be told.
        let lost = numbers.filter_map(AdaptiveScale::number).filter(|number| number.take_loss());
        if lost.count() > 0 {
            self.sums.iteration.get_mut().close();
            self.losses.iter_mut().for_each(Loss::close);
        }
    }

    fn add(
        &mut self,
        loss_id: usize,
        loss: &Tensor,
        optimizer: &mut dyn AmpOptimizer,
        retain_graph: bool,
    ) -> Result<()> {
        self.loss_mut(loss_id)?;
        ensure_defined("loss", loss)?;
        self.forget_failed_capture();
        self.sums.iteration.get_mut().record_leftovers()?;
        if let Some(record) = self.sums.record(optimizer)? {
            if self.sums.iteration.get_mut()[record].stage == Stage::Stepped {
                return Err(Error::Scaler(ScalerError::AlreadyStepped));
            }
            // A step has failed. The next one checks the new sums.
            self.sums.abandon(optimizer)?;
        }
        let Self { losses, sums } = self;
        let count = losses.len();
        let its = losses.get_mut(loss_id);
        let its = its.ok_or(ScalerError::NoSuchLoss { loss_id, losses: count })?;
        its.backward(loss, optimizer, retain_graph, sums)
    }

    /// Steps the optimizer if the gradients of all losses and their sums are finite. Synchronizes like
    /// [`GradScaler::step`].
    ///
    /// # Errors
    ///
    /// The same as [`GradScaler::step`].
    pub fn step(&mut self, optimizer: &mut dyn AmpOptimizer) -> Result<StepOutcome> {
        self.step_by(optimizer, |sums, optimizer| sums.step(optimizer))
    }

    /// Clips the gradients to a common norm and steps, like [`GradScaler::step_clip_norm`].
    ///
    /// # Errors
    ///
    /// The same as [`GradScaler::step_clip_norm`].
    pub fn step_clip_norm(
        &mut self,
        optimizer: &mut dyn AmpOptimizer,
        clip: impl Into<ClipNorm>,
    ) -> Result<StepOutcome> {
        self.step_by(optimizer, |sums, optimizer| sums.step_clip_norm(optimizer, clip))
    }

    /// Clamps every element of the summed gradients and steps if the gradients of all losses are finite, like
    /// [`GradScaler::step_clip_value`].
    ///
    /// # Errors
    ///
    /// The same as [`GradScaler::step_clip_value`].
    pub fn step_clip_value(
        &mut self,
        optimizer: &mut dyn AmpOptimizer,
        max: f64,
    ) -> Result<StepOutcome> {
        self.step_by(optimizer, |sums, optimizer| sums.step_clip_value(optimizer, max))
    }

    fn step_by<'a>(
        &mut self,
        optimizer: &'a mut dyn AmpOptimizer,
        step: impl FnOnce(&mut GradScaler, &'a mut dyn AmpOptimizer) -> Result<StepOutcome>,
    ) -> Result<StepOutcome> {
        if !self.is_enabled() {
            return step(&mut self.sums, optimizer);
        }
        let identity = Identity::of(optimizer)?;
        self.look(optimizer, &identity)?;
        let outcome = step(&mut self.sums, optimizer)?;
        self.losses.iter_mut().for_each(|loss| loss.set_stepped(&identity));
        Ok(outcome)
    }

    /// Checks the sums, and makes the step depend on the flags of the losses, too.
    fn look(&mut self, optimizer: &mut dyn AmpOptimizer, identity: &Identity) -> Result<()> {
        if self.sums.record(optimizer)?.is_some() {
            // A second step fails in the scaler, and a retry after a failed one has been checked.
            return Ok(());
        }
        let Some(record) = self.sums.open(optimizer)? else {
            return Ok(());
        };
        let iteration = self.sums.iteration.get_mut();
        for flag in self.losses.iter().flat_map(|loss| loss.found(identity)) {
            iteration[record].found.push(flag.shallow_clone());
        }
        Ok(())
    }

    /// Ends the iteration: backs off the scales of the losses whose gradients overflowed, and counts the iteration
    /// towards the growth of the others that had a backward. Losses without a backward keep their state. Synchronizes
    /// like [`GradScaler::update`].
    ///
    /// # Errors
    ///
    /// [`ScalerError::NoInfChecks`] if there was neither a backward with gradients nor a step since the last update,
    /// and [`ScalerError::UnscaleFailed`] as from [`GradScaler::update`]; nothing is changed then.
    /// [`ScalerError::TooManySkips`] and [`ScalerError::ScaleAtMinimum`] as from [`GradScaler::update`], for the first
    /// loss concerned; the iteration has been ended for all losses then.
    pub fn update(&mut self) -> Result<()> {
        if !self.is_enabled() {
            return Ok(());
        }
        let sums = self.sums.iteration.get_mut();
        if !sums.is_open() && self.losses.iter().all(Loss::is_closed) {
            return Err(Error::Scaler(ScalerError::NoInfChecks));
        }
        sums.check_broken()?;
        let ends: Result<Vec<_>> =
            self.losses.iter_mut().filter_map(|loss| loss.end().transpose()).collect();
        let given_up = end_all(&mut ends?)?;
        sums.close();
        self.losses.iter_mut().for_each(Loss::close);
        let scales = self.losses.iter().filter_map(|loss| loss.scale.number());
        self.sums.first.get_mut().end_iteration(scales);
        given_up.map_or(Ok(()), Err)
    }

    /// Returns for each loss whether any of its gradients has been infinite or NaN since the last update. Synchronizes
    /// if only the device has the answer.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if the device cannot be read.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Tensor};
    /// use tch_amp::optim::Sgd;
    /// use tch_amp::scaler::PerLossScalers;
    ///
    /// # let w = Tensor::from_slice(&[1f32]).set_requires_grad(true);
    /// # let mut opt = Sgd::default().build(&[w.shallow_clone()], 0.1)?;
    /// let mut scalers = PerLossScalers::new(Device::Cpu, 2)?;
    /// scalers.backward(0, &w.sum(None), &mut opt)?;
    /// scalers.backward(1, &(&w * f64::INFINITY).sum(None), &mut opt)?;
    /// assert_eq!(scalers.overflowed()?, [false, true]);
    /// assert!(scalers.step(&mut opt)?.is_skipped()?);
    /// scalers.update()?;
    /// assert_eq!((scalers.get_scale(0)?, scalers.get_scale(1)?), (65536.0, 32768.0));
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn overflowed(&self) -> Result<Vec<bool>> {
        self.losses.iter().map(Loss::overflowed).collect()
    }

    /// Removes an optimizer from this iteration, like [`GradScaler::abandon`].
    ///
    /// # Errors
    ///
    /// The same as [`GradScaler::abandon`].
    pub fn abandon(&mut self, optimizer: &mut dyn AmpOptimizer) -> Result<()> {
        let identity = Identity::of(optimizer)?;
        self.sums.abandon(optimizer)?;
        if let Some(known) = self.losses.iter().filter_map(|loss| loss.most_known(&identity)).max()
        {
            self.losses.iter_mut().for_each(|loss| loss.abandon(&identity, known));
        }
        Ok(())
    }

    /// Returns the state of each scaler, in the order of the losses. Synchronizes like [`GradScaler::state_dict`].
    ///
    /// # Errors
    ///
    /// [`ScalerError::IterationOpen`] between `backward` and `update`; otherwise the same as
    /// [`GradScaler::state_dict`].
    pub fn state_dict(&self) -> Result<Vec<GradScalerState>> {
        self.check_closed("state_dict")?;
        self.losses.iter().map(|loss| loss.scale.state_dict()).collect()
    }

    /// Loads saved states.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if the number of states is not that of the losses; otherwise the same as
    /// [`GradScaler::load_state_dict`]. Nothing is changed then.
    pub fn load_state_dict(&mut self, states: &[GradScalerState]) -> Result<()> {
        let loaded = self.prepare_states(states)?;
        self.set_states(loaded)
    }

    /// Checks states and allocates what loading them needs; `None` for each if the scalers are disabled.
    pub(crate) fn prepare_states(
        &self,
        states: &[GradScalerState],
    ) -> Result<Vec<Option<LoadedState>>> {
        let (name, value) = ("the number of states", states.len() as f64);
        ensure(name, value, states.len() == self.losses.len(), "that of the losses")?;
        self.check_closed("load_state_dict")?;
        let both = self.losses.iter().zip(states);
        both.map(|(loss, state)| loss.scale.prepare_state(state)).collect()
    }

    pub(crate) fn set_states(&mut self, loaded: Vec<Option<LoadedState>>) -> Result<()> {
        let both = self.losses.iter_mut().zip(loaded);
        let mut both = both.filter_map(|(loss, loaded)| Some((loss, loaded?)));
        both.try_for_each(|(loss, loaded)| loss.scale.set_state(loaded))
    }

    fn check_closed(&self, call: &'static str) -> Result<()> {
        if self.losses.iter().all(Loss::is_closed) {
            return Ok(());
        }
        Err(ScalerError::IterationOpen { call }.into())
    }
}

/// A loss, its scale, and its backwards since the last update. A backward takes the optimizer's gradients away, runs,
/// unscales the new ones by the scale of this loss, and adds those from before. If it fails, the gradients from before
/// are put back.
#[derive(Debug)]
pub(super) struct Loss {
    pub(super) scale: AdaptiveScale,
    passes: Vec<Pass>,
}

/// A backward of the loss for an optimizer.
#[derive(Debug)]
struct Pass {
    owner: Identity,
    /// Whether the loss has given each of the optimizer's parameters a gradient.
    has_gradient: Vec<bool>,
    flags: Vec<FoundInf>,
    /// Whether a step has been taken or skipped with its gradients.
    is_stepped: bool,
}

/// An optimizer, identified by its parameters, which are kept alive so that no other tensors get their identities.
#[derive(Debug)]
pub(super) struct Identity {
    parameters: Vec<Tensor>,
    identities: Vec<usize>,
    known: IdentityMap<()>,
}

impl Identity {
    pub(super) fn of(optimizer: &dyn AmpOptimizer) -> Result<Self> {
        let parameters = optimizer.parameters().into_owned();
        let identities = ffi::identities(&parameters)?;
        let known = identities.iter().map(|identity| (*identity, ())).collect();
        Ok(Self { parameters, identities, known })
    }

    /// Returns whether the other optimizer has these parameters first.
    fn begins(&self, other: &Self) -> bool {
        other.identities.starts_with(&self.identities)
    }
}

impl Pass {
    /// Returns whether a step of the optimizer uses its gradients.
    fn concerns(&self, optimizer: &Identity) -> bool {
        let given = self.owner.identities.iter().zip(&self.has_gradient);
        let mut given = given.filter_map(|(identity, has)| has.then_some(identity));
        !self.is_stepped && given.any(|identity| optimizer.known.contains_key(identity))
    }
}

impl Loss {
    pub(super) fn new(scale: AdaptiveScale) -> Self {
        Self { scale, passes: Vec::new() }
    }

    /// Returns whether there was no backward since the last update.
    pub(super) fn is_closed(&self) -> bool {
        self.passes.is_empty()
    }

    fn flags(&self) -> impl Iterator<Item = &FoundInf> {
        self.passes.iter().flat_map(|pass| &pass.flags)
    }

    /// The flags on which the step of an optimizer depends.
    pub(super) fn found(&self, optimizer: &Identity) -> impl Iterator<Item = &FoundInf> {
        self.passes.iter().filter(|pass| pass.concerns(optimizer)).flat_map(|pass| &pass.flags)
    }

    /// Records that the optimizer's step was taken or skipped, so that no later one depends on the same flags.
    pub(super) fn set_stepped(&mut self, optimizer: &Identity) {
        for pass in &mut self.passes {
            pass.is_stepped |= pass.concerns(optimizer);
        }
    }

    /// Scales the loss, runs backward on it, and adds the unscaled gradients to those of the optimizer's parameters.
    /// `sums` names the parameters in errors.
    pub(super) fn backward(
        &mut self,
        loss: &Tensor,
        optimizer: &mut dyn AmpOptimizer,
        retain_graph: bool,
        sums: &GradScaler,
    ) -> Result<()> {
        if !self.scale.is_enabled() {
            return ffi::backward(loss, retain_graph);
        }
        let owner = Identity::of(optimizer)?;
        let mut before = StashedGradients::from(optimizer.parameters().into_owned())?;
        ffi::backward(&self.scale.apply(loss)?, retain_graph)?;
        if optimizer.wants_f32_gradients() {
            // Checks before it changes.
            let _plan = Plan::new(&sums.gradients(optimizer)?, true)?;
            before.widen()?;
        }
        let mut gradients = sums.gradients(optimizer)?;
        gradients.separate()?;
        let flags = self.unscale(&gradients)?;
        before.add()?;
        before.settle();
        if !flags.is_empty() {
            let has_gradient = gradients.snapshot().iter().map(Gradient::is_used).collect();
            self.passes.push(Pass { owner, has_gradient, flags, is_stepped: false });
        }
        Ok(())
    }

    /// Unscales the gradients, those of this loss alone.
    fn unscale(&self, gradients: &Gradients<'_>) -> Result<Vec<FoundInf>> {
        let Some(scale) = self.scale.number() else {
            return Ok(Vec::new());
        };
        let plan = Plan::new(gradients, self.scale.config().may_unscale_fp16())?;
        drop_frozen(gradients.parameters(), gradients.snapshot())?;
        if plan.groups.is_empty() {
            return Ok(Vec::new());
        }
        let found = plan.unscale(gradients.parameters(), scale.tensor(), scale.unscaling());
        found.map_err(|interrupted| interrupted.error)
    }

    /// Returns whether any of its gradients was non-finite. Synchronizes if only the device has the answer.
    pub(super) fn overflowed(&self) -> Result<bool> {
        match overflow(self.flags()) {
            Some(known) => Ok(known),
            None => ffi::any_nonzero(&self.flags().map(|flag| &flag.tensor).collect::<Vec<_>>()),
        }
    }

    /// The most parameters with which a backward that was not stepped with has begun the optimizer's list, which may
    /// have grown since.
    pub(super) fn most_known(&self, optimizer: &Identity) -> Option<usize> {
        let open = self.passes.iter().filter(|pass| !pass.is_stepped);
        let known = open.map(|pass| &pass.owner).filter(|owner| owner.begins(optimizer));
        known.map(|owner| owner.parameters.len()).max()
    }

    /// Removes the backwards for an optimizer, of whose parameters they knew this many.
    pub(super) fn abandon(&mut self, optimizer: &Identity, known: usize) {
        self.passes.retain(|pass| {
            let is_its = pass.owner.parameters.len() == known && pass.owner.begins(optimizer);
            pass.is_stepped || !is_its
        });
    }

    /// Prepares the end of its iteration; `None` if there was no backward.
    pub(super) fn end(&mut self) -> Result<Option<End<'_>>> {
        let Self { scale, passes } = self;
        let flags = passes.iter().flat_map(|pass| &pass.flags);
        if passes.is_empty() { Ok(None) } else { scale.end(flags) }
    }

    /// Forgets all backwards.
    pub(super) fn close(&mut self) {
        self.passes.clear();
    }
}

/// Saves one part for each loss: `name.0`, `name.1` and so on.
impl Stateful for PerLossScalers {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        for (id, scaler) in self.state_dict()?.into_iter().enumerate() {
            state.scaler(Some(id), scaler);
        }
        Ok(())
    }

    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        let states = (0..self.loss_count()).map(|loss| saved.scaler(Some(loss)));
        let loaded = self.prepare_states(&states.collect::<Result<Vec<_>>>()?)?;
        Ok(Prepared::step(move || self.set_states(loaded)))
    }
}

//! One scale for each loss.

use std::cell::RefCell;

use tch::nn::VarStore;
use tch::{Device, Tensor};

use crate::checkpoint::{Prepared, SaveState, SavedState, Stateful};
use crate::error::{Error, Result, ScalerError, ensure, ensure_defined};
use crate::ffi::{self, FoundInf, Gradient};
use crate::gradients::{ClipNorm, Gradients, IdentityMap, Plan, StashedGradients, overflow};
use crate::optim::AmpOptimizer;
use crate::scale::{AdaptiveScale, LoadedState, end_all};
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
    /// The scale of each loss.
    scales: Vec<AdaptiveScale>,
    /// The backwards since the last update, in the order of the losses.
    passes: Vec<Pass>,
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
            AdaptiveScale::new(device, GradScalerConfig { enabled, ..*config })
        };
        let scales = configs.iter().map(new).collect::<Result<_>>()?;
        let mut sums =
            if enabled { GradScaler::skip_only(device)? } else { GradScaler::disabled() };
        let warns = enabled && configs.iter().all(|config| config.warn_of_skips);
        sums.first = RefCell::new(FirstSteps::new(warns));
        Ok(Self { scales, passes: Vec::new(), sums })
    }

    /// Returns whether the scalers are enabled.
    pub fn is_enabled(&self) -> bool {
        self.sums.is_enabled()
    }

    /// Returns the number of losses.
    pub fn loss_count(&self) -> usize {
        self.scales.len()
    }

    /// Returns the scale of a loss; 1 if the scalers are disabled. Synchronizes like [`GradScaler::get_scale`].
    ///
    /// # Errors
    ///
    /// [`ScalerError::NoSuchLoss`]; otherwise the same as [`GradScaler::get_scale`].
    pub fn get_scale(&self, loss_id: usize) -> Result<f64> {
        Ok(self.scale(loss_id)?.value()?.scale.into())
    }

    /// Returns the number of consecutive iterations in which a loss had a backward and no overflow; 0 if the scalers
    /// are disabled. Synchronizes like [`GradScaler::get_growth_tracker`].
    ///
    /// # Errors
    ///
    /// The same as [`get_scale`](Self::get_scale).
    pub fn get_growth_tracker(&self, loss_id: usize) -> Result<i64> {
        Ok(self.scale(loss_id)?.value()?.tracker.into())
    }

    /// Returns the current options of the scaler of a loss.
    ///
    /// # Errors
    ///
    /// [`ScalerError::NoSuchLoss`].
    pub fn config(&self, loss_id: usize) -> Result<&GradScalerConfig> {
        Ok(self.scale(loss_id)?.config())
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
        self.scale(loss_id)?;
        self.scales[loss_id].set_config(config)
    }

    fn scale(&self, loss_id: usize) -> Result<&AdaptiveScale> {
        let losses = self.scales.len();
        Ok(self.scales.get(loss_id).ok_or(ScalerError::NoSuchLoss { loss_id, losses })?)
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
        let numbers = self.scales.iter().chain([&self.sums.scale]);
        // Each of them has to be told.
        let lost = numbers.filter_map(AdaptiveScale::number).filter(|number| number.take_loss());
        if lost.count() > 0 {
            self.sums.iteration.get_mut().close();
            self.passes.clear();
        }
    }

    fn add(
        &mut self,
        loss_id: usize,
        loss: &Tensor,
        optimizer: &mut dyn AmpOptimizer,
        retain_graph: bool,
    ) -> Result<()> {
        self.scale(loss_id)?;
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
        if !self.is_enabled() {
            return ffi::backward(loss, retain_graph);
        }
        if let Some(pass) = self.pass(loss_id, loss, optimizer, retain_graph)? {
            let later = self.passes.partition_point(|known| known.loss_id <= loss_id);
            self.passes.insert(later, pass);
        }
        Ok(())
    }

    /// Takes the optimizer's gradients away, runs backward on the scaled loss, unscales the new gradients, and adds
    /// those from before. If it fails, the gradients from before are put back.
    fn pass(
        &self,
        loss_id: usize,
        loss: &Tensor,
        optimizer: &mut dyn AmpOptimizer,
        retain_graph: bool,
    ) -> Result<Option<Pass>> {
        let scale = &self.scales[loss_id];
        let owner = Identity::of(optimizer)?;
        let mut before = StashedGradients::from(optimizer.parameters().into_owned())?;
        ffi::backward(&scale.apply(loss)?, retain_graph)?;
        if optimizer.wants_f32_gradients() {
            // Checks before it changes.
            let _plan = Plan::new(&self.sums.gradients(optimizer)?, true)?;
            before.widen()?;
        }
        let mut gradients = self.sums.gradients(optimizer)?;
        gradients.separate()?;
        let flags = unscale(scale, &gradients)?;
        before.add()?;
        before.settle();
        let has_gradient = gradients.snapshot().iter().map(Gradient::is_used).collect();
        let pass = Pass { loss_id, owner, has_gradient, flags, is_stepped: false };
        Ok(Some(pass).filter(|pass| !pass.flags.is_empty()))
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
        for pass in &mut self.passes {
            pass.is_stepped |= pass.concerns(&identity);
        }
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
        let its = self.passes.iter().filter(|pass| pass.concerns(identity));
        let flags = its.flat_map(|pass| &pass.flags).map(FoundInf::shallow_clone);
        self.sums.iteration.get_mut()[record].found.extend(flags);
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
        let Self { scales, passes, sums } = self;
        let iteration = sums.iteration.get_mut();
        if !iteration.is_open() && passes.is_empty() {
            return Err(Error::Scaler(ScalerError::NoInfChecks));
        }
        iteration.check_broken()?;
        let used = scales.iter_mut().enumerate();
        let used = used.filter(|(id, _)| flags_of(passes, *id).next().is_some());
        let ends = used.map(|(id, scale)| scale.end(flags_of(passes, id)));
        let mut ends: Vec<_> = ends.filter_map(Result::transpose).collect::<Result<_>>()?;
        let given_up = end_all(&mut ends)?;
        iteration.close();
        passes.clear();
        sums.first.get_mut().end_iteration(scales.iter().filter_map(AdaptiveScale::number));
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
        let overflowed = |id| {
            let flags = || flags_of(&self.passes, id);
            match overflow(flags()) {
                Some(known) => Ok(known),
                None => ffi::any_nonzero(&flags().map(|flag| &flag.tensor).collect::<Vec<_>>()),
            }
        };
        (0..self.loss_count()).map(overflowed).collect()
    }

    /// Removes an optimizer from this iteration, like [`GradScaler::abandon`].
    ///
    /// # Errors
    ///
    /// The same as [`GradScaler::abandon`].
    pub fn abandon(&mut self, optimizer: &mut dyn AmpOptimizer) -> Result<()> {
        let identity = Identity::of(optimizer)?;
        self.sums.abandon(optimizer)?;
        let is_open = |pass: &Pass| !pass.is_stepped && pass.owner.begins(&identity);
        // Its backwards that knew most of its parameters: the list may have grown since.
        let known = |pass: &Pass| pass.owner.parameters.len();
        let most = self.passes.iter().filter(|pass| is_open(pass)).map(known).max();
        self.passes.retain(|pass| !is_open(pass) || Some(known(pass)) != most);
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
        self.scales.iter().map(AdaptiveScale::state_dict).collect()
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
    fn prepare_states(&self, states: &[GradScalerState]) -> Result<Vec<Option<LoadedState>>> {
        let (name, value) = ("the number of states", states.len() as f64);
        ensure(name, value, states.len() == self.scales.len(), "that of the losses")?;
        self.check_closed("load_state_dict")?;
        let both = self.scales.iter().zip(states);
        both.map(|(scale, state)| scale.prepare_state(state)).collect()
    }

    fn set_states(&mut self, loaded: Vec<Option<LoadedState>>) -> Result<()> {
        let mut both = self.scales.iter_mut().zip(loaded);
        both.try_for_each(|(scale, loaded)| scale.set_state(loaded))
    }

    fn check_closed(&self, call: &'static str) -> Result<()> {
        let open = ScalerError::IterationOpen { call };
        if self.passes.is_empty() { Ok(()) } else { Err(open.into()) }
    }
}

/// A backward of a loss for an optimizer.
#[derive(Debug)]
struct Pass {
    loss_id: usize,
    owner: Identity,
    /// Whether the loss has given each of the optimizer's parameters a gradient.
    has_gradient: Vec<bool>,
    flags: Vec<FoundInf>,
    /// Whether a step has been taken or skipped with its gradients, so that no later one depends on its flags.
    is_stepped: bool,
}

/// The flags of the backwards of a loss.
fn flags_of(passes: &[Pass], loss_id: usize) -> impl Iterator<Item = &FoundInf> {
    passes.iter().filter(move |pass| pass.loss_id == loss_id).flat_map(|pass| &pass.flags)
}

/// Unscales the gradients, those of one loss alone.
fn unscale(scale: &AdaptiveScale, gradients: &Gradients<'_>) -> Result<Vec<FoundInf>> {
    let Some(number) = scale.number() else {
        return Ok(Vec::new());
    };
    let plan = Plan::new(gradients, scale.config().may_unscale_fp16())?;
    gradients.drop_frozen()?;
    if plan.groups.is_empty() {
        return Ok(Vec::new());
    }
    let found = plan.unscale(gradients.parameters(), number.tensor(), number.unscaling());
    found.map_err(|interrupted| interrupted.error)
}

/// An optimizer, identified by its parameters, which are kept alive so that no other tensors get their identities.
#[derive(Debug)]
struct Identity {
    parameters: Vec<Tensor>,
    identities: Vec<usize>,
    known: IdentityMap<()>,
}

impl Identity {
    fn of(optimizer: &dyn AmpOptimizer) -> Result<Self> {
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

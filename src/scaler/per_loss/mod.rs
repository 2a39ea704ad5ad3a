//! One scale for each loss.

mod loss;

use tch::nn::VarStore;
use tch::{Device, Tensor};

use crate::error::{Error, Result, ScalerError, ensure};
use crate::optim::AmpOptimizer;
use crate::scale::{AdaptiveScale, LoadedState, end_all};
use crate::scaler::iteration::Stage;
use crate::scaler::{GradScaler, GradScalerConfig, GradScalerState, StepOutcome};
use loss::{Identity, Loss};

/// A scaler for each of several losses, whose gradients add up to one step: a loss that overflows often then does not
/// lower the scale of the others. As `num_losses` of `apex.amp.initialize`. PyTorch has no twin.
///
/// [`backward`](Self::backward) unscales the gradients of its loss and adds them to those of the losses before, so that
/// between it and [`step`](Self::step) the gradients are unscaled: clip there. A step is skipped when any loss
/// overflowed, and [`update`](Self::update) backs off the scales of those alone. A
/// [`Checkpoint`](crate::checkpoint::Checkpoint) takes all of them with `add_scalers`.
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
    /// Looks at the sums of the unscaled gradients, and steps.
    sums: GradScaler,
}

impl PerLossScalers {
    /// Makes `losses` scalers with PyTorch's defaults, whose scales lie on `device`: the device of the losses.
    ///
    /// # Errors
    ///
    /// As [`with_configs`](Self::with_configs).
    pub fn new(device: Device, losses: usize) -> Result<Self> {
        Self::with_configs(device, &vec![GradScalerConfig::default(); losses])
    }

    /// Makes a scaler for each loss. When one is not enabled, none is.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] without any loss; as [`GradScalerConfig::build`].
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
        let sums = if enabled { GradScaler::skip_only(device)? } else { GradScaler::disabled() };
        Ok(Self { losses, sums })
    }

    /// Tells whether the scalers do anything.
    pub fn is_enabled(&self) -> bool {
        self.sums.is_enabled()
    }

    /// Returns the number of losses.
    pub fn loss_count(&self) -> usize {
        self.losses.len()
    }

    /// Returns the scale of a loss, as [`GradScaler::get_scale`] does; 1 if the scalers are disabled. Waits as that.
    ///
    /// # Errors
    ///
    /// [`ScalerError::NoSuchLoss`]; as [`GradScaler::get_scale`].
    pub fn get_scale(&self, loss_id: usize) -> Result<f64> {
        Ok(self.loss(loss_id)?.scale.value()?.map_or(1.0, |value| value.scale.into()))
    }

    /// Returns the number of iterations in a row in which a loss had a backward and no overflow, as
    /// [`GradScaler::get_growth_tracker`] does; 0 if the scalers are disabled. Waits as that.
    ///
    /// # Errors
    ///
    /// As [`get_scale`](Self::get_scale).
    pub fn get_growth_tracker(&self, loss_id: usize) -> Result<i64> {
        Ok(self.loss(loss_id)?.scale.value()?.map_or(0, |value| value.tracker.into()))
    }

    /// Returns the options of the scaler of a loss as they are now.
    ///
    /// # Errors
    ///
    /// [`ScalerError::NoSuchLoss`].
    pub fn config(&self, loss_id: usize) -> Result<&GradScalerConfig> {
        Ok(self.loss(loss_id)?.scale.config())
    }

    /// Sets what the scale of a loss is multiplied by when it grows, as [`GradScaler::set_growth_factor`].
    ///
    /// # Errors
    ///
    /// [`ScalerError::NoSuchLoss`]; as [`GradScaler::set_growth_factor`].
    pub fn set_growth_factor(&mut self, loss_id: usize, growth_factor: f64) -> Result<()> {
        self.loss_mut(loss_id)?.scale.set_growth_factor(growth_factor)
    }

    /// Sets what the scale of a loss is multiplied by when it backs off, as [`GradScaler::set_backoff_factor`].
    ///
    /// # Errors
    ///
    /// [`ScalerError::NoSuchLoss`]; as [`GradScaler::set_backoff_factor`].
    pub fn set_backoff_factor(&mut self, loss_id: usize, backoff_factor: f64) -> Result<()> {
        self.loss_mut(loss_id)?.scale.set_backoff_factor(backoff_factor)
    }

    /// Sets the number of iterations without overflow before the scale of a loss grows, as
    /// [`GradScaler::set_growth_interval`].
    ///
    /// # Errors
    ///
    /// [`ScalerError::NoSuchLoss`]; as [`GradScaler::set_growth_interval`].
    pub fn set_growth_interval(&mut self, loss_id: usize, growth_interval: i64) -> Result<()> {
        self.loss_mut(loss_id)?.scale.set_growth_interval(growth_interval)
    }

    fn loss(&self, loss_id: usize) -> Result<&Loss> {
        let losses = self.losses.len();
        Ok(self.losses.get(loss_id).ok_or(ScalerError::NoSuchLoss { loss_id, losses })?)
    }

    fn loss_mut(&mut self, loss_id: usize) -> Result<&mut Loss> {
        let losses = self.losses.len();
        Ok(self.losses.get_mut(loss_id).ok_or(ScalerError::NoSuchLoss { loss_id, losses })?)
    }

    /// Takes the names of a VarStore's variables, as [`GradScaler::name_parameters`].
    ///
    /// # Errors
    ///
    /// As [`GradScaler::name_parameters`].
    pub fn name_parameters(&mut self, vs: &VarStore) -> Result<()> {
        self.sums.name_parameters(vs)
    }

    /// Scales a loss, runs its backward, unscales the gradients of the optimizer's parameters and adds them to those
    /// that these have. Call it once for each loss, or several times for one loss of several micro-batches. Waits as
    /// [`GradScaler::unscale_`].
    ///
    /// Parameters of the graph that are not the optimizer's get scaled gradients: detach them, or zero those, and do
    /// not keep what a loss leaves in another optimizer. Needs the memory of a second set of gradients meanwhile.
    ///
    /// # Errors
    ///
    /// [`ScalerError::NoSuchLoss`]; [`ScalerError::AlreadyStepped`] before `update`; as [`GradScaler::backward`] and
    /// [`GradScaler::unscale_`]. The optimizer's gradients are those from before then, after a panic, too.
    pub fn backward(
        &mut self,
        loss_id: usize,
        loss: &Tensor,
        optimizer: &mut dyn AmpOptimizer,
    ) -> Result<()> {
        self.add(loss_id, loss, optimizer, false)
    }

    /// Does as [`backward`](Self::backward) and keeps the graph, for another loss that has a part of it in common. As
    /// `backward(retain_graph=True)` in PyTorch; tch has no twin.
    ///
    /// # Errors
    ///
    /// As [`backward`](Self::backward).
    pub fn backward_retain_graph(
        &mut self,
        loss_id: usize,
        loss: &Tensor,
        optimizer: &mut dyn AmpOptimizer,
    ) -> Result<()> {
        self.add(loss_id, loss, optimizer, true)
    }

    fn add(
        &mut self,
        loss_id: usize,
        loss: &Tensor,
        optimizer: &mut dyn AmpOptimizer,
        retain_graph: bool,
    ) -> Result<()> {
        self.loss_mut(loss_id)?;
        if let Some(record) = self.sums.record(optimizer)? {
            if self.sums.iteration.get_mut().stage(record) == Stage::Stepped {
                return Err(Error::Scaler(ScalerError::AlreadyStepped));
            }
            // A step has failed; the next one looks at the new sums.
            self.sums.abandon(optimizer)?;
        }
        let Self { losses, sums } = self;
        let count = losses.len();
        let its = losses.get_mut(loss_id);
        let its = its.ok_or(ScalerError::NoSuchLoss { loss_id, losses: count })?;
        its.backward(loss, optimizer, retain_graph, sums)
    }

    /// Steps the optimizer if the gradients of all losses, and their sums, are finite. Waits as [`GradScaler::step`].
    ///
    /// # Errors
    ///
    /// As [`GradScaler::step`].
    pub fn step(&mut self, optimizer: &mut dyn AmpOptimizer) -> Result<StepOutcome> {
        self.look(optimizer)?;
        self.sums.step(optimizer)
    }

    /// Clips the gradients to a common 2-norm and steps, as [`GradScaler::step_clip_norm`].
    ///
    /// # Errors
    ///
    /// As [`GradScaler::step_clip_norm`].
    pub fn step_clip_norm(
        &mut self,
        optimizer: &mut dyn AmpOptimizer,
        max_norm: f64,
    ) -> Result<StepOutcome> {
        self.look(optimizer)?;
        self.sums.step_clip_norm(optimizer, max_norm)
    }

    /// Clamps every element of the sums and steps, as [`GradScaler::step_clip_value`], if all gradients of all losses
    /// are finite.
    ///
    /// # Errors
    ///
    /// As [`GradScaler::step_clip_value`].
    pub fn step_clip_value(
        &mut self,
        optimizer: &mut dyn AmpOptimizer,
        max: f64,
    ) -> Result<StepOutcome> {
        self.look(optimizer)?;
        self.sums.step_clip_value(optimizer, max)
    }

    /// Looks at the sums, and has the step depend on what was found in their parts, too.
    fn look(&mut self, optimizer: &mut dyn AmpOptimizer) -> Result<()> {
        if self.sums.record(optimizer)?.is_some() {
            // A second step: an error, or another try after one.
            return Ok(());
        }
        let identity = Identity::of(optimizer)?;
        let Some(record) = self.sums.open(optimizer)? else {
            return Ok(());
        };
        let iteration = self.sums.iteration.get_mut();
        for flag in self.losses.iter().flat_map(|loss| loss.found(&identity)) {
            iteration.add_found(record, flag.shallow_clone());
        }
        Ok(())
    }

    /// Ends the iteration: backs off the scales of the losses whose gradients overflowed, and counts towards the growth
    /// of those that had a backward. The others stay as they are. Waits as [`GradScaler::update`].
    ///
    /// # Errors
    ///
    /// [`ScalerError::NoInfChecks`] when there was neither a backward with gradients nor a step since the last update, and
    /// [`ScalerError::UnscaleFailed`] as from [`GradScaler::update`]; nothing changes then.
    /// [`ScalerError::TooManySkips`] and [`ScalerError::ScaleAtMinimum`] as from [`GradScaler::update`], the first of them; the
    /// iteration has been ended for all losses then.
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
        given_up.map_or(Ok(()), Err)
    }

    /// Tells for each loss whether its gradients have held an infinity or a NaN since the last update. Waits for the
    /// device where only that knows.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if the device cannot be read.
    pub fn overflowed(&self) -> Result<Vec<bool>> {
        self.losses.iter().map(Loss::overflowed).collect()
    }

    /// Forgets what was found in an optimizer's gradients in this iteration, as [`GradScaler::abandon`].
    ///
    /// # Errors
    ///
    /// As [`GradScaler::abandon`].
    pub fn abandon(&mut self, optimizer: &mut dyn AmpOptimizer) -> Result<()> {
        let identity = Identity::of(optimizer)?;
        self.sums.abandon(optimizer)?;
        self.losses.iter_mut().for_each(|loss| loss.abandon(&identity));
        Ok(())
    }

    /// Returns the state of each scaler, in the order of the losses. Waits as [`GradScaler::state_dict`].
    ///
    /// # Errors
    ///
    /// [`ScalerError::IterationOpen`] between `backward` and `update`.
    pub fn state_dict(&self) -> Result<Vec<GradScalerState>> {
        self.check_closed("state_dict")?;
        self.losses.iter().map(|loss| loss.scale.state_dict()).collect()
    }

    /// Takes over saved states.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for another number of states than losses; as [`GradScaler::load_state_dict`]. Nothing
    /// changes then.
    pub fn load_state_dict(&mut self, states: &[GradScalerState]) -> Result<()> {
        let loaded = self.prepare_states(states)?;
        self.set_states(loaded)
    }

    /// Checks states and makes what loading them takes; `None` for each if the scalers are disabled.
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

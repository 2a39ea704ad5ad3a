//! One scale for each loss.

mod loss;

use tch::nn::VarStore;
use tch::{Device, Tensor};

use crate::error::{Error, Result};
use crate::optim::AmpOptimizer;
use crate::scaler::iteration::Stage;
use crate::scaler::update::end_all;
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
/// use tch_amp::{PerLossScalers, optim::AdamW};
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
    /// [`Error::InvalidValue`] without any loss; as [`GradScalerConfig::build`].
    pub fn with_configs(device: Device, configs: &[GradScalerConfig]) -> Result<Self> {
        if configs.is_empty() {
            let field = "the number of losses";
            return Err(Error::InvalidValue { field, value: 0.0, rule: "at least 1" });
        }
        let enabled = configs.iter().all(|config| config.enabled);
        let build = |config: &GradScalerConfig| {
            let scaler = GradScalerConfig { enabled, ..*config }.build(device)?;
            Ok(Loss::new(scaler))
        };
        let losses = configs.iter().map(build).collect::<Result<_>>()?;
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

    /// Returns the scaler of a loss, to ask for its scale, say, or to save it in a checkpoint between iterations.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchLoss`].
    pub fn scaler(&self, loss_id: usize) -> Result<&GradScaler> {
        let losses = self.losses.len();
        Ok(&self.losses.get(loss_id).ok_or(Error::NoSuchLoss { loss_id, losses })?.scaler)
    }

    /// Returns the scaler of a loss, to change its settings or to load its state.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchLoss`].
    pub fn scaler_mut(&mut self, loss_id: usize) -> Result<&mut GradScaler> {
        Ok(&mut self.loss_mut(loss_id)?.scaler)
    }

    pub(crate) fn scalers_mut(&mut self) -> impl Iterator<Item = &mut GradScaler> {
        self.losses.iter_mut().map(|loss| &mut loss.scaler)
    }

    fn loss_mut(&mut self, loss_id: usize) -> Result<&mut Loss> {
        let losses = self.losses.len();
        self.losses.get_mut(loss_id).ok_or(Error::NoSuchLoss { loss_id, losses })
    }

    /// Takes the names of a VarStore's variables, as [`GradScaler::name_parameters`].
    ///
    /// # Errors
    ///
    /// As [`GradScaler::name_parameters`].
    pub fn name_parameters(&mut self, vs: &VarStore) -> Result<()> {
        self.sums.name_parameters(vs)?;
        self.scalers_mut().try_for_each(|scaler| scaler.name_parameters(vs))
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
    /// [`Error::NoSuchLoss`]; [`Error::AlreadyStepped`] before `update`; as [`GradScaler::backward`] and
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
                return Err(Error::AlreadyStepped);
            }
            // A step has failed; the next one looks at the new sums.
            self.sums.abandon(optimizer)?;
        }
        self.loss_mut(loss_id)?.add(loss, optimizer, retain_graph)
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
            iteration.add_found(record, flag.lend());
        }
        Ok(())
    }

    /// Ends the iteration: backs off the scales of the losses whose gradients overflowed, and counts towards the growth
    /// of those that had a backward. The others stay as they are. Waits as [`GradScaler::update`].
    ///
    /// # Errors
    ///
    /// [`Error::NoInfChecks`] when there was neither a backward with gradients nor a step since the last update, and
    /// [`Error::UnscaleFailed`] as from [`GradScaler::update`]; nothing changes then.
    /// [`Error::TooManySkips`] and [`Error::ScaleAtMinimum`] as from [`GradScaler::update`], the first of them; the
    /// iteration has been ended for all losses then.
    pub fn update(&mut self) -> Result<()> {
        if !self.is_enabled() {
            return Ok(());
        }
        let sums = self.sums.iteration.get_mut();
        if !sums.is_open() && self.losses.iter().all(Loss::is_closed) {
            return Err(Error::NoInfChecks);
        }
        sums.check_broken()?;
        let ends: Result<Vec<_>> = self.losses.iter_mut().filter_map(Loss::end).collect();
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
    /// [`Error::IterationOpen`] between `backward` and `update`.
    pub fn state_dict(&self) -> Result<Vec<GradScalerState>> {
        self.losses.iter().map(|loss| loss.scaler.state_dict()).collect()
    }

    /// Takes over saved states.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidValue`] for another number of states than losses; as [`GradScaler::load_state_dict`]. Nothing
    /// changes then.
    pub fn load_state_dict(&mut self, states: &[GradScalerState]) -> Result<()> {
        let (field, value) = ("the number of states", states.len() as f64);
        if states.len() != self.losses.len() {
            return Err(Error::InvalidValue { field, value, rule: "that of the losses" });
        }
        let both = self.losses.iter().zip(states);
        let loaded: Result<Vec<_>> =
            both.map(|(loss, state)| loss.scaler.prepare_state(state)).collect();
        let both = self.losses.iter_mut().zip(loaded?);
        let both = both.filter_map(|(loss, loaded)| Some((loss, loaded?)));
        both.into_iter().try_for_each(|(loss, loaded)| loss.scaler.set_state(loaded))
    }
}

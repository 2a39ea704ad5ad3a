//! Gradient scaling: a loss is multiplied by a large number before backward, so that small fp16 gradients do not vanish,
//! and the gradients are divided by it again before the optimizer sees them.

#![forbid(unsafe_code)]

mod config;
mod gradients;
mod iteration;
mod outcome;
mod scale;
mod state;
mod unscaled;

use std::borrow::Borrow;
use std::cell::RefCell;
use std::collections::HashMap;

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

pub use config::GradScalerConfig;
pub use outcome::StepOutcome;
pub use state::ScalerState;
pub use unscaled::Unscaled;

use crate::device::check_usable;
use crate::error::{Error, Result};
use crate::optim::AmpOptimizer;
use crate::{autocast, ffi};
use gradients::Plan;
use iteration::{Iteration, Owner, Stage};
use outcome::Step;
use scale::{Mirror, Scale};
use state::Progress;

/// Scales losses, unscales gradients, skips the steps whose gradients are infinite or NaN, and adapts the scale. The
/// twin of `torch.amp.GradScaler`, with its defaults and its arithmetic, bit by bit.
///
/// An iteration is: [`scale`](Self::scale) or [`backward`](Self::backward), for each optimizer optionally
/// [`unscale_`](Self::unscale_), then [`step`](Self::step), and one [`update`](Self::update) at the end.
///
/// ```
/// use tch::{Device, Kind, Tensor, nn, nn::OptimizerConfig};
/// use tch_amp::{GradScaler, autocast};
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let net = nn::linear(vs.root(), 4, 1, Default::default());
/// let mut opt = nn::Sgd::default().build(&vs, 0.1)?;
/// let mut scaler = GradScaler::new(Device::Cpu)?;
/// for _ in 0..3 {
///     let xs = Tensor::randn([8, 4], (Kind::Float, Device::Cpu));
///     opt.zero_grad();
///     let loss = autocast(Device::Cpu, || xs.apply(&net).square().mean(Kind::Float))?;
///     scaler.backward(&loss)?;
///     assert!(scaler.step(&mut opt)?.is_stepped()?);
///     scaler.update()?;
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct GradScaler {
    config: GradScalerConfig,
    /// `None` for a disabled scaler.
    scale: Option<Scale>,
    /// Iterations in a row with overflow; counted where the host knows.
    skips: u32,
    /// Shared, so that several transactions can be open at once.
    iteration: RefCell<Iteration>,
    /// By identity; the tensors keep the identities from being given to others.
    names: HashMap<usize, (String, Tensor)>,
}

impl GradScaler {
    /// Makes a scaler with PyTorch's defaults, whose scale lies on `device`: the device of the loss.
    ///
    /// # Errors
    ///
    /// [`Error::DeviceUnavailable`] when the device cannot be used here, with the reason. PyTorch warns and disables
    /// itself.
    pub fn new(device: Device) -> Result<Self> {
        GradScalerConfig::default().build(device)
    }

    /// Makes a scaler that does nothing, so that one loop serves both: losses and gradients stay as they are, `step`
    /// always steps, and the scale is 1. As `enabled=False` in PyTorch.
    pub fn disabled() -> Self {
        Self::from_parts(
            GradScalerConfig {
                enabled: false,
                ..Default::default()
            },
            None,
        )
    }

    pub(crate) fn with_config(device: Device, config: GradScalerConfig) -> Result<Self> {
        config.check()?;
        if !config.enabled {
            return Ok(Self::from_parts(config, None));
        }
        check_usable(device)?;
        let scale = Scale::new(device, config.init_scale)?;
        Ok(Self::from_parts(config, Some(scale)))
    }

    fn from_parts(config: GradScalerConfig, scale: Option<Scale>) -> Self {
        let (iteration, names) = (RefCell::default(), HashMap::new());
        Self {
            config,
            scale,
            skips: 0,
            iteration,
            names,
        }
    }

    /// Tells whether the scaler does anything.
    pub fn is_enabled(&self) -> bool {
        self.scale.is_some()
    }

    /// Multiplies a loss, or any output that is going to be differentiated, by the scale.
    ///
    /// The result has the output's shape and device. fp16 and bf16 outputs of any shape become f32 first, because
    /// 65536 is infinite in fp16; PyTorch does so for 0-dim outputs only. Does not wait for the device.
    ///
    /// # Errors
    ///
    /// [`Error::ScaleKind`] for an integer, boolean or complex tensor.
    pub fn scale(&self, output: &Tensor) -> Result<Tensor> {
        let Some(scale) = &self.scale else {
            return Ok(output.shallow_clone());
        };
        let output = match output.f_kind()? {
            Kind::Float | Kind::Double => output.shallow_clone(),
            Kind::Half | Kind::BFloat16 => output.f_to_kind(Kind::Float)?,
            kind => return Err(Error::ScaleKind { kind }),
        };
        self.iteration.borrow_mut().note_scale()?;
        let factor = scale.tensor();
        if factor.device() == output.device() {
            return Ok(output.f_mul(factor)?);
        }
        Ok(output.f_mul(&factor.f_to_device_(output.device(), Kind::Float, true, false)?)?)
    }

    /// Multiplies several outputs by the scale, each on its own device. Does not wait for any.
    ///
    /// # Errors
    ///
    /// As [`scale`](Self::scale).
    pub fn scale_all<T: Borrow<Tensor>>(&self, outputs: &[T]) -> Result<Vec<Tensor>> {
        outputs
            .iter()
            .map(|output| self.scale(output.borrow()))
            .collect()
    }

    /// Scales a loss and runs its backward: short for `scaler.scale(&loss)?.f_backward()?`.
    ///
    /// # Errors
    ///
    /// As [`scale`](Self::scale), and [`Error::Torch`] when backward fails.
    pub fn backward(&self, loss: &Tensor) -> Result<()> {
        Ok(self.scale(loss)?.f_backward()?)
    }

    /// Divides the gradients of an optimizer's parameters by the scale, in place, and records whether any is infinite
    /// or NaN. Does not wait for the device.
    ///
    /// Needed only to look at or change gradients before [`step`](Self::step), which does it otherwise. Gradients may
    /// be f32, f64, bf16 or complex, dense in any layout or COO sparse, on several devices; missing ones are left out,
    /// and a gradient that a frozen parameter still carries is dropped. Clip before the next loss is scaled.
    ///
    /// # Errors
    ///
    /// [`Error::AlreadyUnscaled`], [`Error::UnscaleAfterStep`], [`Error::SharedParameter`] and [`Error::Gradient`];
    /// no gradient is touched then.
    pub fn unscale_(&mut self, optimizer: &mut dyn AmpOptimizer) -> Result<()> {
        self.open(optimizer)?;
        Ok(())
    }

    /// Unscales as [`unscale_`](Self::unscale_) and returns a transaction that clips and steps. Several optimizers can
    /// be in such transactions at once.
    ///
    /// # Errors
    ///
    /// As [`unscale_`](Self::unscale_).
    pub fn unscale<'a, O: AmpOptimizer>(&'a self, optimizer: &'a mut O) -> Result<Unscaled<'a, O>> {
        let record = self.open(optimizer)?;
        Ok(Unscaled::new(self, optimizer, record))
    }

    /// Steps the optimizer if all its gradients are finite, and unscales them first unless that was done.
    ///
    /// For gradients on a GPU the host waits for the answer, in one transfer for all parameters and devices. Numbers
    /// that changed since `unscale_`, as clipping changes them, are checked again. After a step the autocast weight
    /// cache is cleared.
    ///
    /// # Errors
    ///
    /// [`Error::AlreadyStepped`]; [`Error::GradientChanged`] when a gradient is not the one that was unscaled, because
    /// it appeared, was replaced, or changed after another loss was scaled; those of [`unscale_`](Self::unscale_); and
    /// what the optimizer's own step returns.
    pub fn step(&mut self, optimizer: &mut dyn AmpOptimizer) -> Result<StepOutcome> {
        self.step_shared(optimizer)
    }

    fn step_shared(&self, optimizer: &mut dyn AmpOptimizer) -> Result<StepOutcome> {
        let Some(scale) = &self.scale else {
            optimizer.step()?;
            return Ok(StepOutcome(Step::Stepped));
        };
        let parameters = optimizer.parameters();
        let describe = |index| self.describe(optimizer, &parameters, index);
        let now = ffi::gradients_inspect(&parameters)?;
        let mut iteration = self.iteration.borrow_mut();
        let record = match iteration.owner(&now) {
            Owner::Record(record) if iteration.stage(record) == Some(Stage::Stepped) => {
                return Err(Error::AlreadyStepped);
            }
            Owner::Record(record) => {
                iteration.verify(record, &parameters, now, scale.tensor(), &describe)?;
                record
            }
            Owner::Shared(index) => {
                return Err(Error::SharedParameter {
                    parameter: describe(index),
                });
            }
            Owner::Nobody if parameters.is_empty() => return Ok(StepOutcome(Step::NoGradients)),
            Owner::Nobody => {
                let plan = Plan::new(&now, self.config.allow_fp16_gradients, &describe)?;
                let (scale, recheck) = (scale.tensor(), scale.may_enlarge());
                iteration.unscale(&parameters, now, &plan, scale, recheck)?
            }
        };
        drop((iteration, parameters));
        self.finish(record, optimizer)
    }

    /// Takes the step that the record allows.
    fn finish(&self, record: usize, optimizer: &mut dyn AmpOptimizer) -> Result<StepOutcome> {
        let mut iteration = self.iteration.borrow_mut();
        let step = if !iteration.has_gradients(record) {
            Step::NoGradients
        } else if iteration.found_inf(record)? {
            Step::Skipped
        } else {
            Step::Stepped
        };
        drop(iteration);
        if step == Step::Stepped {
            optimizer.step()?;
            // Inside a region the cache would go on serving the old weights.
            autocast::clear_autocast_cache();
        }
        self.iteration
            .borrow_mut()
            .set_stage(record, Stage::Stepped);
        Ok(StepOutcome(step))
    }

    /// Unscales and returns the record; `None` when there is nothing to record.
    fn open(&self, optimizer: &mut dyn AmpOptimizer) -> Result<Option<usize>> {
        let Some(scale) = &self.scale else {
            return Ok(None);
        };
        let parameters = optimizer.parameters();
        if parameters.is_empty() {
            return Ok(None);
        }
        let describe = |index| self.describe(optimizer, &parameters, index);
        let now = ffi::gradients_inspect(&parameters)?;
        let mut iteration = self.iteration.borrow_mut();
        match iteration.owner(&now) {
            Owner::Nobody => {}
            Owner::Shared(index) => {
                return Err(Error::SharedParameter {
                    parameter: describe(index),
                });
            }
            Owner::Record(record) => {
                return Err(match iteration.stage(record) {
                    Some(Stage::Stepped) => Error::UnscaleAfterStep,
                    _ => Error::AlreadyUnscaled,
                });
            }
        }
        let plan = Plan::new(&now, self.config.allow_fp16_gradients, &describe)?;
        let record =
            iteration.unscale(&parameters, now, &plan, scale.tensor(), scale.may_enlarge())?;
        iteration.keep_parameters(record, parameters.into_owned());
        Ok(Some(record))
    }

    /// Forgets that an optimizer was unscaled in this iteration, for a loop that decides not to step it and not to
    /// call `update` either. Its gradients stay unscaled: zero them before the next backward.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if the parameters cannot be read.
    pub fn abandon(&mut self, optimizer: &mut dyn AmpOptimizer) -> Result<()> {
        let now = ffi::gradients_inspect(&optimizer.parameters())?;
        let mut iteration = self.iteration.borrow_mut();
        if let Owner::Record(record) = iteration.owner(&now) {
            iteration.abandon(record);
        }
        Ok(())
    }

    /// Ends the iteration: backs the scale off if any optimizer's gradients overflowed, or counts towards its growth.
    ///
    /// Does not wait for the device, unless `hysteresis` or `max_consecutive_skips` is set and the overflow of an
    /// optimizer that was unscaled but not stepped is known on a GPU only.
    ///
    /// # Errors
    ///
    /// [`Error::NoInfChecks`] when no gradient was checked since the last update; nothing changes then.
    /// [`Error::TooManySkips`] at the configured limit; the iteration has been ended as usual then.
    pub fn update(&mut self) -> Result<()> {
        let Some(scale) = &mut self.scale else {
            return Ok(());
        };
        let iteration = self.iteration.get_mut();
        let (found_infs, mut overflow) = iteration.found_infs();
        if found_infs.is_empty() {
            return Err(Error::NoInfChecks);
        }
        let asks = self.config.hysteresis > 1 || self.config.max_consecutive_skips.is_some();
        if overflow.is_none() && asks {
            overflow = Some(ffi::any_nonzero(&found_infs)?);
        }
        let skips = if overflow == Some(true) {
            self.skips.saturating_add(1)
        } else {
            0
        };
        let tolerated = skips > 0 && skips < self.config.hysteresis;
        scale.update(&found_infs, overflow, &self.config.rule(tolerated))?;
        self.skips = skips;
        iteration.close();
        match self.config.max_consecutive_skips {
            Some(limit) if skips >= limit => Err(Error::TooManySkips {
                skips,
                limit,
                scale: scale.value()?.scale.into(),
            }),
            _ => Ok(()),
        }
    }

    /// Ends the iteration with a given scale. The growth tracker stays. As `update(new_scale)` with a number.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidValue`] unless `new_scale` is from `min_scale` to `max_scale`; nothing changes then.
    pub fn update_with(&mut self, new_scale: f64) -> Result<()> {
        let Some(scale) = &mut self.scale else {
            return Ok(());
        };
        self.config.check_scale("new_scale", new_scale)?;
        let now = scale.value()?;
        scale.set(Mirror {
            scale: new_scale as f32,
            ..now
        })?;
        self.iteration.get_mut().close();
        Ok(())
    }

    /// Ends the iteration with the scale in a one-element tensor. Waits for the tensor's device, because a scale that
    /// is not finite must not get through. As `update(new_scale)` with a tensor.
    ///
    /// # Errors
    ///
    /// As [`update_with`](Self::update_with), and [`Error::Torch`] for a tensor of more than one element.
    pub fn update_with_tensor(&mut self, new_scale: &Tensor) -> Result<()> {
        let value = new_scale.f_view(-1)?.f_detach()?;
        if value.numel() != 1 {
            return Err(Error::Torch("new_scale must have one element".to_owned()));
        }
        self.update_with(value.f_double_value(&[0])?)
    }

    /// Returns the scale; 1 for a disabled scaler.
    ///
    /// Waits for the device only when an optimizer was unscaled there and not stepped since the scale was last known.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if the device cannot be read.
    pub fn get_scale(&self) -> Result<f64> {
        self.scale
            .as_ref()
            .map_or(Ok(1.0), |scale| Ok(scale.value()?.scale.into()))
    }

    /// Returns the number of iterations in a row without overflow; 0 for a disabled scaler. Waits as
    /// [`get_scale`](Self::get_scale). As `_get_growth_tracker` in PyTorch.
    ///
    /// # Errors
    ///
    /// As [`get_scale`](Self::get_scale).
    pub fn get_growth_tracker(&self) -> Result<i64> {
        self.scale
            .as_ref()
            .map_or(Ok(0), |scale| Ok(scale.value()?.tracker.into()))
    }

    /// Returns what the scale is multiplied by when it grows.
    pub fn get_growth_factor(&self) -> f64 {
        self.config.growth_factor
    }

    /// Sets what the scale is multiplied by when it grows.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidValue`] unless it is finite and more than 1; the old value stays then.
    pub fn set_growth_factor(&mut self, growth_factor: f64) -> Result<()> {
        self.reconfigure(GradScalerConfig {
            growth_factor,
            ..self.config
        })
    }

    /// Returns what the scale is multiplied by when it backs off.
    pub fn get_backoff_factor(&self) -> f64 {
        self.config.backoff_factor
    }

    /// Sets what the scale is multiplied by when it backs off.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidValue`] unless it is between 0 and 1; the old value stays then.
    pub fn set_backoff_factor(&mut self, backoff_factor: f64) -> Result<()> {
        self.reconfigure(GradScalerConfig {
            backoff_factor,
            ..self.config
        })
    }

    /// Returns the number of iterations without overflow before the scale grows.
    pub fn get_growth_interval(&self) -> i64 {
        self.config.growth_interval
    }

    /// Sets the number of iterations without overflow before the scale grows. With more than that behind it already,
    /// the scale grows at the next one; in PyTorch it would never grow again.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidValue`] unless it is from 1 to 2^31 - 1; the old value stays then.
    pub fn set_growth_interval(&mut self, growth_interval: i64) -> Result<()> {
        self.reconfigure(GradScalerConfig {
            growth_interval,
            ..self.config
        })?;
        self.scale
            .as_mut()
            .map_or(Ok(()), |scale| scale.clamp_tracker(growth_interval))
    }

    fn reconfigure(&mut self, config: GradScalerConfig) -> Result<()> {
        config.check()?;
        self.config = config;
        Ok(())
    }

    /// Returns the state to save: the empty one for a disabled scaler. Waits as [`get_scale`](Self::get_scale).
    ///
    /// # Errors
    ///
    /// [`Error::IterationOpen`] between `unscale_` or `step` and `update`, where a part of the state is in the
    /// gradients.
    pub fn state_dict(&self) -> Result<ScalerState> {
        let Some(scale) = &self.scale else {
            return Ok(ScalerState::default());
        };
        self.check_closed("state_dict")?;
        let Mirror { scale, tracker } = scale.value()?;
        Ok(ScalerState::save(
            &self.config,
            Progress {
                scale,
                tracker,
                skips: self.skips,
            },
        ))
    }

    /// Takes over a saved state. Nothing happens to a disabled scaler.
    ///
    /// # Errors
    ///
    /// [`Error::EmptyState`], [`Error::MissingKey`] and [`Error::InvalidValue`] for a state that no scaler can have
    /// saved, and [`Error::IterationOpen`]; nothing changes then.
    pub fn load_state_dict(&mut self, state: &ScalerState) -> Result<()> {
        if self.scale.is_none() {
            return Ok(());
        }
        self.check_closed("load_state_dict")?;
        let (
            config,
            Progress {
                scale,
                tracker,
                skips,
            },
        ) = state.load(&self.config)?;
        if let Some(tensors) = &mut self.scale {
            tensors.set(Mirror { scale, tracker })?;
        }
        (self.config, self.skips) = (config, skips);
        Ok(())
    }

    fn check_closed(&self, call: &'static str) -> Result<()> {
        if self.iteration.borrow().is_open() {
            Err(Error::IterationOpen { call })
        } else {
            Ok(())
        }
    }

    /// Takes the names of a VarStore's variables, for messages about their gradients. Variables that are added later
    /// need another call.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if the variables cannot be read.
    pub fn name_parameters(&mut self, vs: &VarStore) -> Result<()> {
        let (names, tensors): (Vec<_>, Vec<_>) = vs.variables().into_iter().unzip();
        let identities = ffi::gradients_inspect(&tensors)?;
        let named = names.into_iter().zip(tensors);
        self.names
            .extend(identities.iter().map(|known| known.parameter).zip(named));
        Ok(())
    }

    fn describe(&self, optimizer: &dyn AmpOptimizer, all: &[Tensor], index: usize) -> String {
        let known = || {
            let identity = ffi::gradients_inspect(&all[index..=index])
                .ok()?
                .first()?
                .parameter;
            self.names.get(&identity).map(|(name, _)| name.clone())
        };
        gradients::describe(
            index,
            &all[index],
            optimizer.parameter_name(index).or_else(known),
        )
    }
}

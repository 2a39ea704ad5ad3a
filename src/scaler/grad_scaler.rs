//! The scaler itself.

use std::cell::{RefCell, RefMut};
use std::collections::HashMap;
#[cfg(feature = "insight")]
use std::collections::HashSet;
use std::fmt::Debug;
use std::sync::{Arc, Weak};

use tch::nn::VarStore;
use tch::{Device, Tensor};

use crate::checkpoint::{Prepared, SaveState, SavedState, Stateful};
use crate::error::{Error, Result, ScalerError, ensure_defined};
#[cfg(feature = "insight")]
use crate::ffi::Gradient;
use crate::gradients::NonFiniteGradient;
use crate::optim::AmpOptimizer;
use crate::scale::{AdaptiveScale, LoadedState};
use crate::scaler::first_steps::FirstSteps;
use crate::scaler::iteration::Iteration;
use crate::scaler::{GradScalerConfig, GradScalerState};
use crate::tree::{Tree, leaves};
use crate::variables::{named, variables};
use crate::{capture, ffi};

/// The ranks that skip the same steps.
pub(crate) trait Agreement: Debug + Send + Sync {
    /// Returns whether any rank has found a non-finite gradient. Takes what this rank has found, or the error that kept
    /// it from looking. It returns such an error, and fails on the other ranks with its message.
    fn any(&self, found: Result<bool>) -> Result<bool>;
}

/// A model whose gradients are averaged over ranks.
pub(crate) trait Averaged: Debug + Send + Sync {
    /// Returns whether its gradients are now those of this rank alone.
    fn is_alone(&self) -> bool;

    /// Returns whether it has one of the parameters with these identities.
    fn has_any(&self, identities: &[usize]) -> bool;
}

/// Scales losses, unscales gradients, skips the steps whose gradients are infinite or NaN, and adapts the scale. The
/// counterpart of `torch.amp.GradScaler`, with the same defaults and, bit for bit, the same arithmetic.
///
/// In each iteration call [`scale`](Self::scale) or [`backward`](Self::backward); for each optimizer, optionally
/// [`unscale_`](Self::unscale_) and then [`step`](Self::step); and at the end [`update`](Self::update) once. Optimizers
/// that have parameters in common take turns: each zeroes the gradients, scales its own loss and steps.
///
/// # Gradients from before an update
///
/// An optimizer that steps after the next [`update`](Self::update), or after another change of the scale, divides a
/// gradient by the scale of its loss; PyTorch divides by the new scale. A gradient that [`unscale_`](Self::unscale_)
/// has divided is not divided again, even if the program has changed it before the update, as by clipping. A step fails
/// with [`GradientError::MixedScales`](crate::gradients::GradientError::MixedScales) if the backward of a later loss
/// has added to either, the host knows that the two scales differ, and all gradients are finite. While the scale stands
/// still, gradients may accumulate over updates. The backward of a loss that was scaled before an update has to come
/// before it: libtorch refuses it afterwards, as in PyTorch, unless the loss is on another device than the scale. If a
/// backward on a GPU may have made such a sum, the step reads flags there, and synchronizes.
///
/// This holds for a gradient that only backwards of losses of this scaler have made before the update, that was missing
/// or, on the CPU, zero when the first of them was scaled, and that no step has used. Every other gradient is divided
/// by the present scale, as in PyTorch:
///
/// - if the program has changed it by other means, unless that was between [`unscale_`](Self::unscale_) and the update;
/// - if a backward adds to it while the host does not know one of the scales: on a GPU, after the step of a fused
///   optimizer or after an update that found gradients unscaled and not stepped, until [`get_scale`](Self::get_scale)
///   reads it;
/// - if it has changed more often than losses were scaled by [`scale`](Self::scale), as that of a parameter that a loss
///   uses several times; after [`backward`](Self::backward) that makes no difference. A change by the program is taken
///   for the backward of a scaled loss that has not run;
/// - if it is fp16, or its memory is that of other tensors too, as in `DistributedDataParallel`;
/// - if the iteration is captured in a graph of a GPU;
/// - after more than 1,024 losses in one iteration;
/// - if for 128 iterations no optimizer has stepped with a gradient from before an update or was left unscaled, and no
///   combination of optimizers has stepped that is new: the scaler then no longer looks for such gradients until one of
///   these happens. It knows 32 combinations.
///
/// # Examples
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
    pub(super) scale: AdaptiveScale,
    /// A `RefCell`, so that several transactions can be open at once.
    pub(super) iteration: RefCell<Iteration>,
    pub(super) first: RefCell<FirstSteps>,
    /// The names of parameters by identity. The tensors are kept so that no other tensor gets their identity.
    pub(super) names: HashMap<usize, (String, Tensor)>,
    /// The distributed models whose loss was scaled.
    pub(super) ranks: Vec<Weak<dyn Averaged>>,
    /// The ranks that skip the same steps as this one.
    pub(super) agreement: Option<Arc<dyn Agreement>>,
}

impl GradScalerConfig {
    /// Makes a scaler whose scale is on `device`, which should be the device of the loss.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for a field outside its range; [`Error::DeviceUnavailable`], with the reason, for an
    /// enabled scaler on a device that cannot be used here.
    pub fn build(self, device: Device) -> Result<GradScaler> {
        Ok(GradScaler::from_scale(AdaptiveScale::new(device, self)?))
    }
}

impl GradScaler {
    /// Makes a scaler with PyTorch's defaults, whose scale is on `device`, which should be the device of the loss.
    ///
    /// # Errors
    ///
    /// [`Error::DeviceUnavailable`], with the reason, if the device cannot be used here. PyTorch warns instead and
    /// disables the scaler.
    pub fn new(device: Device) -> Result<Self> {
        GradScalerConfig::default().build(device)
    }

    /// Makes a scaler that scales nothing, so that the same loop runs with and without scaling: `step` always steps,
    /// and the scale is 1. Calls that clip, such as `step_clip_norm`, do clip. It refuses no order of calls, because
    /// nothing is divided that could be divided twice. Corresponds to `enabled=False` in PyTorch.
    pub fn disabled() -> Self {
        Self::from_scale(AdaptiveScale::disabled())
    }

    /// Makes a scaler that leaves losses as they are and skips the steps whose gradients are infinite or NaN. It is
    /// meant for bf16, which has f32's exponent range, so that gradients do not underflow, but one bad batch can still
    /// ruin the weights.
    ///
    /// [`step`](Self::step) reports what was skipped, and [`StepCounter`](crate::scaler::StepCounter) counts it. Like
    /// `check_grad_overflow` for bf16 in DeepSpeed, except that skips are reported.
    ///
    /// # Errors
    ///
    /// The same as [`new`](Self::new).
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Tensor};
    /// use tch_amp::GradScaler;
    /// use tch_amp::optim::Sgd;
    ///
    /// let w = Tensor::from_slice(&[1f32]).set_requires_grad(true);
    /// let mut opt = Sgd::default().build(&[w.shallow_clone()], 0.25)?;
    /// let mut scaler = GradScaler::skip_only(Device::Cpu)?;
    /// for bad_batch in [true, false] {
    ///     opt.zero_grad()?;
    ///     scaler.backward(&(&w * if bad_batch { f64::NAN } else { 1.0 }).sum(None))?;
    ///     assert_eq!(scaler.step(&mut opt)?.is_skipped()?, bad_batch);
    ///     scaler.update()?;
    /// }
    /// assert_eq!(w.double_value(&[0]), 0.75);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn skip_only(device: Device) -> Result<Self> {
        let (init_scale, min_scale, max_scale) = (1.0, 1.0, 1.0);
        GradScalerConfig { init_scale, min_scale, max_scale, ..Default::default() }.build(device)
    }

    fn from_scale(scale: AdaptiveScale) -> Self {
        let first = RefCell::new(FirstSteps::new(scale.config().warn_of_skips));
        let (iteration, names, ranks) = (RefCell::default(), HashMap::new(), Vec::new());
        Self { scale, iteration, first, names, ranks, agreement: None }
    }

    /// The state of the iteration, for a change. Fails within a call of the scaler that is asking an optimizer for the
    /// name of a parameter.
    pub(super) fn iteration(&self) -> Result<RefMut<'_, Iteration>> {
        self.iteration.try_borrow_mut().map_err(|_| Error::InvalidArgument {
            name: "the optimizer",
            problem: "uses its scaler in `parameter_name`, which the scaler is calling; return a name that is known"
                .to_owned(),
        })
    }

    /// Makes the scaler skip the same steps as those of other ranks.
    #[cfg(feature = "distributed")]
    pub(crate) fn set_agreement(&mut self, agreement: Arc<dyn Agreement>) {
        self.agreement = Some(agreement);
    }

    /// Makes the scaler refuse to unscale or step while the gradients of a model are those of this rank alone.
    #[cfg(feature = "distributed")]
    pub(crate) fn note_ranks(&mut self, model: &Arc<dyn Averaged>) {
        let new = Arc::downgrade(model);
        self.ranks.retain(|known| known.strong_count() > 0 && !known.ptr_eq(&new));
        self.ranks.push(new);
    }

    /// Returns whether the scaler is enabled. The counterpart of `is_enabled`.
    pub fn is_enabled(&self) -> bool {
        self.scale.is_enabled()
    }

    /// Multiplies a loss, or any other outputs that are going to be differentiated, by the scale. The counterpart of
    /// `scale`, which takes a tensor or nested lists of tensors; here it is any [`Tree`].
    ///
    /// Each result has the shape and the device of its output. fp16 and bf16 outputs become f32 first, because 65536 is
    /// infinite in fp16, unless the scale is fixed at 1; PyTorch widens only 0-dim outputs. Backward casts the scaled
    /// gradient back to the output's dtype all the same, so compute the loss in f32: `xs.mean(Kind::Float)` rather than
    /// `xs.mean(None)`. The scale is copied once to each other device that has an output. Synchronizes, once, only
    /// where the scale is on a GPU and an output on the CPU.
    ///
    /// # Errors
    ///
    /// [`ScalerError::Dtype`] for an integer, boolean or complex tensor, and [`Error::InvalidArgument`] for an
    /// undefined one.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Kind, Tensor};
    /// use tch_amp::GradScaler;
    ///
    /// let scaler = GradScaler::new(Device::Cpu)?;
    /// let loss = Tensor::from(2f32).to_kind(Kind::Half);
    /// assert_eq!(scaler.scale(&loss)?, Tensor::from(131072f32));
    ///
    /// let (main, others) = scaler.scale(&(&loss, vec![Tensor::from(0.5f32), Tensor::from(0.25f32)]))?;
    /// assert_eq!((main, others.len()), (Tensor::from(131072f32), 2));
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn scale<T: Tree + ?Sized>(&self, outputs: &T) -> Result<T::Output> {
        self.refuse_open_iteration()?;
        let scaled = self.scale.apply(outputs)?;
        // After scaling: if that fails, no backward follows.
        self.iteration()?.note_scale(&leaves(outputs), self.scale.number())?;
        Ok(scaled)
    }

    /// Refuses to capture an iteration that begins with the records of another one, and forgets those of a capture that
    /// has failed.
    pub(super) fn refuse_open_iteration(&self) -> Result<()> {
        let Some(number) = self.scale.number() else { return Ok(()) };
        if number.take_loss() {
            self.iteration()?.close();
        }
        if number.begins_capture() && self.iteration()?.is_open() {
            let remedy = "call `update` after its step, before the next iteration";
            capture::refuse("the rest of another iteration", remedy)?;
        }
        Ok(())
    }

    /// Scales a loss and runs backward on it: short for `scaler.scale(&loss)?.f_backward()?`.
    ///
    /// # Errors
    ///
    /// The same as [`scale`](Self::scale), and [`Error::Torch`] if backward fails. An undefined loss is refused by a
    /// disabled scaler, too.
    pub fn backward(&self, loss: &Tensor) -> Result<()> {
        ensure_defined("loss", loss)?;
        self.scale(loss)?.f_backward()?;
        self.iteration()?.note_backward();
        Ok(())
    }

    /// Scales a loss, runs backward on it and keeps the graph for another backward through a part of it. Corresponds to
    /// `scaler.scale(loss).backward(retain_graph=True)` in PyTorch; tch has no counterpart.
    ///
    /// # Errors
    ///
    /// The same as [`backward`](Self::backward).
    pub fn backward_retain_graph(&self, loss: &Tensor) -> Result<()> {
        ensure_defined("loss", loss)?;
        ffi::backward(&self.scale(loss)?, true)?;
        self.iteration()?.note_backward();
        Ok(())
    }

    /// The scale on its device, unless the scaler is disabled.
    #[cfg(feature = "insight")]
    pub(crate) fn scale_number(&self) -> Option<&Tensor> {
        self.scale.number().map(|number| number.tensor())
    }

    /// Which parameters' gradients have been unscaled in this iteration, by identity; see [`Iteration::unscaled`].
    #[cfg(feature = "insight")]
    pub(crate) fn unscaled(&self, parameters: &[Gradient]) -> Result<HashSet<usize>> {
        self.iteration()?.unscaled(parameters)
    }

    /// Returns whether an optimizer was unscaled or stepped since the last `update`.
    #[cfg(feature = "insight")]
    pub(crate) fn is_between_step_and_update(&self) -> bool {
        self.iteration.try_borrow().is_ok_and(|iteration| iteration.is_open())
    }

    /// Returns whether a loss was scaled since the last `update`.
    #[cfg(feature = "insight")]
    pub(crate) fn is_between_scale_and_update(&self) -> bool {
        self.iteration.try_borrow().is_ok_and(|iteration| iteration.is_scaled())
    }

    /// Returns the scale; 1 for a disabled scaler.
    ///
    /// Synchronizes, once, only if a fused optimizer was stepped on the device, or any optimizer was unscaled there and
    /// not stepped, or a new scale was set there, since the scale was last read.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if the device cannot be read; [`Error::InvalidArgument`], once, if it has refused a new scale
    /// of [`update_with_tensor`](Self::update_with_tensor).
    pub fn get_scale(&self) -> Result<f64> {
        Ok(self.scale.value()?.scale.into())
    }

    /// Returns the number of consecutive iterations without overflow; 0 for a disabled scaler. Synchronizes like
    /// [`get_scale`](Self::get_scale). The counterpart of `_get_growth_tracker`.
    ///
    /// # Errors
    ///
    /// The same as [`get_scale`](Self::get_scale).
    pub fn get_growth_tracker(&self) -> Result<i64> {
        Ok(self.scale.value()?.tracker.into())
    }

    /// Returns the factor by which the scale is multiplied when it grows.
    pub fn get_growth_factor(&self) -> f64 {
        self.scale.config().growth_factor
    }

    /// Sets the factor by which the scale is multiplied when it grows.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] unless it is finite and more than 1; the old value is kept then.
    pub fn set_growth_factor(&mut self, growth_factor: f64) -> Result<()> {
        self.scale.set_config(GradScalerConfig { growth_factor, ..*self.scale.config() })
    }

    /// Returns the factor by which the scale is multiplied when it backs off.
    pub fn get_backoff_factor(&self) -> f64 {
        self.scale.config().backoff_factor
    }

    /// Sets the factor by which the scale is multiplied when it backs off.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] unless it is between 0 and 1; the old value is kept then.
    pub fn set_backoff_factor(&mut self, backoff_factor: f64) -> Result<()> {
        self.scale.set_config(GradScalerConfig { backoff_factor, ..*self.scale.config() })
    }

    /// Returns the number of consecutive iterations without overflow after which the scale grows.
    pub fn get_growth_interval(&self) -> i64 {
        self.scale.config().growth_interval
    }

    /// Sets the number of consecutive iterations without overflow after which the scale grows. If that many are already
    /// counted, the scale grows after the next one; in PyTorch it does not grow until an overflow has reset the count.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] unless it is from 1 to 2^31 - 1; the old value is kept then.
    pub fn set_growth_interval(&mut self, growth_interval: i64) -> Result<()> {
        self.scale.set_config(GradScalerConfig { growth_interval, ..*self.scale.config() })
    }

    /// Returns the state to save; it is empty for a disabled scaler. Synchronizes like [`get_scale`](Self::get_scale).
    ///
    /// # Errors
    ///
    /// [`ScalerError::IterationOpen`] between `unscale_` or `step` and `update`, when a part of the state is in the
    /// gradients; otherwise as in [`get_scale`](Self::get_scale).
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Tensor};
    /// use tch_amp::GradScaler;
    /// use tch_amp::optim::Sgd;
    ///
    /// # let w = Tensor::from_slice(&[1f32]).set_requires_grad(true);
    /// # let mut opt = Sgd::default().build(&[w.shallow_clone()], 0.1)?;
    /// let mut scaler = GradScaler::new(Device::Cpu)?;
    /// scaler.backward(&w.sum(None))?;
    /// scaler.step(&mut opt)?;
    /// assert!(scaler.state_dict().is_err());
    /// scaler.update()?;
    /// assert_eq!(scaler.state_dict()?.growth_tracker, Some(1));
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn state_dict(&self) -> Result<GradScalerState> {
        self.check_closed("state_dict")?;
        self.scale.state_dict()
    }

    /// Loads a saved state. A disabled scaler ignores it.
    ///
    /// # Errors
    ///
    /// [`ScalerError::EmptyState`], [`ScalerError::MissingKey`] and [`Error::InvalidArgument`] for a state that no
    /// scaler can have saved; [`ScalerError::OtherPrecision`] if only one of the two scalers scales;
    /// [`ScalerError::IterationOpen`] between `unscale_` or `step` and `update`. Nothing is changed then.
    pub fn load_state_dict(&mut self, state: &GradScalerState) -> Result<()> {
        let loaded = self.prepare_state(state)?;
        self.set_state(loaded)
    }

    /// Checks a state and allocates what loading it needs; `None` for a disabled scaler, which loads nothing.
    fn prepare_state(&self, state: &GradScalerState) -> Result<Option<LoadedState>> {
        self.check_closed("load_state_dict")?;
        self.scale.prepare_state(state)
    }

    fn set_state(&mut self, loaded: Option<LoadedState>) -> Result<()> {
        let Some(present) = self.scale.number() else { return Ok(()) };
        let iteration = self.iteration.get_mut();
        let ending = iteration.ending(present, true);
        self.scale.set_state(loaded)?;
        // Without memory, the gradients that are left count as gradients of the new scale: loading goes on.
        iteration.carried().end(ending.unwrap_or_default());
        Ok(())
    }

    fn check_closed(&self, call: &'static str) -> Result<()> {
        if self.iteration()?.is_open() {
            return Err(ScalerError::IterationOpen { call }.into());
        }
        Ok(())
    }

    /// Uses the names of a `VarStore`'s variables in messages about their gradients. The scaler keeps handles to the
    /// variables as long as it lives. Call it again for variables that are added later. PyTorch has no counterpart.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if the variables cannot be read.
    pub fn name_parameters(&mut self, vs: &VarStore) -> Result<()> {
        let named = named(variables(vs)?);
        let tensors: Vec<_> = named.iter().map(|(_, tensor)| tensor.shallow_clone()).collect();
        self.names.extend(ffi::identities(&tensors)?.into_iter().zip(named));
        Ok(())
    }

    /// Returns the parameters of an optimizer whose gradients are infinite or NaN somewhere, with the number of such
    /// elements. Call it after a skipped step and before the gradients are zeroed, to find the source of an overflow.
    /// Synchronizes. PyTorch has no counterpart.
    ///
    /// The names come from a fused optimizer or from [`name_parameters`](Self::name_parameters).
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if a gradient cannot be read.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Kind, Tensor, nn, nn::OptimizerConfig};
    /// use tch_amp::GradScaler;
    ///
    /// let vs = nn::VarStore::new(Device::Cpu);
    /// let w = vs.root().var("w", &[3], nn::Init::Const(1.0));
    /// let mut opt = nn::Sgd::default().build(&vs, 0.1)?;
    /// let mut scaler = GradScaler::skip_only(Device::Cpu)?;
    /// scaler.name_parameters(&vs)?;
    /// scaler.backward(&(&w * Tensor::from_slice(&[1.0, f64::INFINITY, f64::NAN])).sum(Kind::Float))?;
    /// if scaler.step(&mut opt)?.is_skipped()? {
    ///     let found = scaler.non_finite_gradients(&opt)?;
    ///     assert_eq!(found[0].to_string(), "parameter `w` [3]: 1 infinite, 1 NaN");
    /// }
    /// scaler.update()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn non_finite_gradients(
        &self,
        optimizer: &dyn AmpOptimizer,
    ) -> Result<Vec<NonFiniteGradient>> {
        capture::refuse("non_finite_gradients", "call it after `replay`")?;
        self.gradients(optimizer)?.non_finite()
    }
}

/// Synchronizes like [`GradScaler::state_dict`], and fails like it between `unscale_` or `step` and `update`.
impl Stateful for GradScaler {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        state.scaler(None, self.state_dict()?);
        Ok(())
    }

    /// Prepares to load a state. A disabled scaler is left as it is.
    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        let loaded = self.prepare_state(&saved.scaler(None)?)?;
        Ok(Prepared::step(move || self.set_state(loaded)))
    }
}

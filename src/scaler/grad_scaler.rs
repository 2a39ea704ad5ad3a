//! The scaler itself.

use std::borrow::Borrow;
use std::cell::RefCell;
use std::collections::HashMap;
#[cfg(feature = "insight")]
use std::collections::HashSet;
use std::sync::{Arc, Weak};

use tch::{Device, Tensor};

use crate::error::Result;
#[cfg(doc)]
use crate::error::{Error, ScalerError};
use crate::ffi;
#[cfg(feature = "insight")]
use crate::ffi::Gradient;
use crate::scale::AdaptiveScale;
use crate::scaler::GradScalerConfig;
use crate::scaler::agreement::{Agreement, Averaged};
use crate::scaler::iteration::Iteration;

/// Scales losses, unscales gradients, skips the steps whose gradients are infinite or NaN, and adapts the scale. The
/// counterpart of `torch.amp.GradScaler`, with the same defaults and, bit for bit, the same arithmetic.
///
/// In each iteration call [`scale`](Self::scale) or [`backward`](Self::backward); for each optimizer, optionally
/// [`unscale_`](Self::unscale_) and then [`step`](Self::step); and at the end [`update`](Self::update) once. Optimizers
/// that have parameters in common take turns: each zeroes the gradients, scales its own loss and steps.
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

    /// Makes a scaler that does nothing, so that the same loop runs with and without scaling: losses and gradients stay
    /// as they are, `step` always steps, and the scale is 1. It refuses no order of calls, because nothing is divided
    /// that could be divided twice. Corresponds to `enabled=False` in PyTorch.
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
        let (iteration, names, ranks) = (RefCell::default(), HashMap::new(), Vec::new());
        Self { scale, iteration, names, ranks, agreement: None }
    }

    /// Has the scaler skip the same steps as those of other ranks.
    #[cfg(feature = "distributed")]
    pub(crate) fn set_agreement(&mut self, agreement: Arc<dyn Agreement>) {
        self.agreement = Some(agreement);
    }

    /// Has the scaler refuse to unscale or to step while the gradients of a model are those of this rank alone.
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

    /// Multiplies a loss, or any other output that is going to be differentiated, by the scale.
    ///
    /// The result has the output's shape and device. fp16 and bf16 outputs become f32 first, because 65536 is infinite
    /// in fp16, unless the scale is fixed at 1; PyTorch widens only 0-dim outputs. Backward casts the scaled gradient
    /// back to the output's dtype all the same, so compute the loss in f32: `xs.mean(Kind::Float)` rather than
    /// `xs.mean(None)`. Synchronizes only where the scale is on a GPU and the output on the CPU.
    ///
    /// # Errors
    ///
    /// [`ScalerError::Dtype`] for an integer, boolean or complex tensor.
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
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn scale(&self, output: &Tensor) -> Result<Tensor> {
        let scaled = self.scale.apply(output)?;
        // After scaling: if that fails, no backward follows.
        self.iteration.borrow_mut().note_scale(output)?;
        Ok(scaled)
    }

    /// Multiplies several outputs by the scale, each on its own device. Synchronizes like [`scale`](Self::scale).
    /// Corresponds to `scale` with a list in PyTorch.
    ///
    /// # Errors
    ///
    /// The same as [`scale`](Self::scale).
    pub fn scale_all<T: Borrow<Tensor>>(&self, outputs: &[T]) -> Result<Vec<Tensor>> {
        outputs.iter().map(|output| self.scale(output.borrow())).collect()
    }

    /// Scales a loss and runs backward on it: short for `scaler.scale(&loss)?.f_backward()?`.
    ///
    /// # Errors
    ///
    /// The same as [`scale`](Self::scale), and [`Error::Torch`] if backward fails.
    pub fn backward(&self, loss: &Tensor) -> Result<()> {
        Ok(self.scale(loss)?.f_backward()?)
    }

    /// Scales a loss, runs backward on it and keeps the graph for another backward through a part of it. Corresponds to
    /// `scaler.scale(loss).backward(retain_graph=True)` in PyTorch; tch has no counterpart.
    ///
    /// # Errors
    ///
    /// The same as [`backward`](Self::backward).
    pub fn backward_retain_graph(&self, loss: &Tensor) -> Result<()> {
        ffi::backward(&self.scale(loss)?, true)
    }

    /// The scale on its device, unless the scaler is disabled.
    #[cfg(feature = "insight")]
    pub(crate) fn scale_number(&self) -> Option<&Tensor> {
        self.scale.number().map(|number| number.tensor())
    }

    /// Which parameters' gradients have been unscaled in this iteration, by identity; see [`Iteration::unscaled`].
    #[cfg(feature = "insight")]
    pub(crate) fn unscaled(&self, parameters: &[Gradient]) -> Result<HashSet<usize>> {
        self.iteration.borrow().unscaled(parameters)
    }

    /// Whether an optimizer was unscaled or stepped since the last `update`.
    #[cfg(feature = "insight")]
    pub(crate) fn is_between_step_and_update(&self) -> bool {
        self.iteration.borrow().is_open()
    }

    /// Returns the scale; 1 for a disabled scaler.
    ///
    /// Synchronizes, once, only if a fused optimizer was stepped on the device, or any optimizer was unscaled there and
    /// not stepped, since the scale was last read.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if the device cannot be read.
    pub fn get_scale(&self) -> Result<f64> {
        Ok(self.scale.value()?.map_or(1.0, |value| value.scale.into()))
    }

    /// Returns the number of consecutive iterations without overflow; 0 for a disabled scaler. Synchronizes like
    /// [`get_scale`](Self::get_scale). The counterpart of `_get_growth_tracker`.
    ///
    /// # Errors
    ///
    /// The same as [`get_scale`](Self::get_scale).
    pub fn get_growth_tracker(&self) -> Result<i64> {
        Ok(self.scale.value()?.map_or(0, |value| value.tracker.into()))
    }
}

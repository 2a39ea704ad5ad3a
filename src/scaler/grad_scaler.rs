//! The scaler itself.

use std::borrow::Borrow;
use std::cell::RefCell;
use std::collections::HashMap;

use tch::{Device, Tensor};

use crate::error::Result;
#[cfg(doc)]
use crate::error::{Error, ScalerError};
use crate::ffi;
use crate::scale::AdaptiveScale;
use crate::scaler::GradScalerConfig;
use crate::scaler::iteration::Iteration;

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
    pub(super) scale: AdaptiveScale,
    /// Shared, so that several transactions can be open at once.
    pub(super) iteration: RefCell<Iteration>,
    /// By identity; the tensors keep the identities from being given to others.
    pub(super) names: HashMap<usize, (String, Tensor)>,
}

impl GradScalerConfig {
    /// Makes a scaler whose scale lies on `device`: the device of the loss.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for a field outside its range; [`Error::DeviceUnavailable`] for an enabled scaler on a
    /// device that cannot be used here, with the reason.
    pub fn build(self, device: Device) -> Result<GradScaler> {
        Ok(GradScaler::from_scale(AdaptiveScale::new(device, self)?))
    }
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
        Self::from_scale(AdaptiveScale::disabled())
    }

    /// Makes a scaler that scales nothing and skips the steps whose gradients are infinite or NaN: for bf16, which has
    /// the range of f32, so that gradients do not vanish, and a bad batch would spoil the weights all the same. Losses
    /// stay as they are, and [`step`](Self::step) says what was skipped;
    /// [`StepCounter`](crate::scaler::StepCounter) counts it. As `check_grad_overflow` of bf16 in DeepSpeed, which does not tell.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn skip_only(device: Device) -> Result<Self> {
        let (init_scale, min_scale, max_scale) = (1.0, 1.0, 1.0);
        GradScalerConfig { init_scale, min_scale, max_scale, ..Default::default() }.build(device)
    }

    fn from_scale(scale: AdaptiveScale) -> Self {
        Self { scale, iteration: RefCell::default(), names: HashMap::new() }
    }

    /// Tells whether the scaler does anything, as `is_enabled` in PyTorch.
    pub fn is_enabled(&self) -> bool {
        self.scale.is_enabled()
    }

    /// Multiplies a loss, or any output that is going to be differentiated, by the scale.
    ///
    /// The result has the output's shape and device. fp16 and bf16 outputs of any shape become f32 first, because 65536
    /// is infinite in fp16, unless the scale is fixed at one; PyTorch does so for 0-dim outputs only. Backward brings the scale back into the output's
    /// dtype all the same, so take the loss in f32: `xs.mean(Kind::Float)` rather than `xs.mean(None)`. Waits for the
    /// device only to bring a scale from a GPU to an output on the CPU.
    ///
    /// # Errors
    ///
    /// [`ScalerError::Dtype`] for an integer, boolean or complex tensor.
    pub fn scale(&self, output: &Tensor) -> Result<Tensor> {
        let scaled = self.scale.apply(output)?;
        // Last: where scaling fails, no backward follows.
        self.iteration.borrow_mut().note_scale()?;
        Ok(scaled)
    }

    /// Multiplies several outputs by the scale, each on its own device. Waits as [`scale`](Self::scale). As
    /// `scale` with a list in PyTorch.
    ///
    /// # Errors
    ///
    /// As [`scale`](Self::scale).
    pub fn scale_all<T: Borrow<Tensor>>(&self, outputs: &[T]) -> Result<Vec<Tensor>> {
        outputs.iter().map(|output| self.scale(output.borrow())).collect()
    }

    /// Scales a loss and runs its backward: short for `scaler.scale(&loss)?.f_backward()?`.
    ///
    /// # Errors
    ///
    /// As [`scale`](Self::scale), and [`Error::Torch`] when backward fails.
    pub fn backward(&self, loss: &Tensor) -> Result<()> {
        Ok(self.scale(loss)?.f_backward()?)
    }

    /// Scales a loss, runs its backward and keeps the graph, for another backward through a part of it. As
    /// `scaler.scale(loss).backward(retain_graph=True)` in PyTorch; tch has no counterpart.
    ///
    /// # Errors
    ///
    /// As [`backward`](Self::backward).
    pub fn backward_retain_graph(&self, loss: &Tensor) -> Result<()> {
        ffi::backward(&self.scale(loss)?, true)
    }

    /// Returns the scale; 1 for a disabled scaler.
    ///
    /// Waits for the device, once, only when a fused optimizer was stepped there, or any was unscaled and not stepped,
    /// since the scale was last known.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if the device cannot be read.
    pub fn get_scale(&self) -> Result<f64> {
        Ok(self.scale.value()?.map_or(1.0, |value| value.scale.into()))
    }

    /// Returns the number of iterations in a row without overflow; 0 for a disabled scaler. Waits as
    /// [`get_scale`](Self::get_scale). As `_get_growth_tracker` in PyTorch.
    ///
    /// # Errors
    ///
    /// As [`get_scale`](Self::get_scale).
    pub fn get_growth_tracker(&self) -> Result<i64> {
        Ok(self.scale.value()?.map_or(0, |value| value.tracker.into()))
    }
}

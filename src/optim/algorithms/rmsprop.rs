//! RMSprop.

use serde::{Deserialize, Serialize};
use torch_files::Value;

use super::{Fields, KEPT, Spec, StateTensor, TorchGroup, flag, float, non_negative};
use crate::error::{Result, ensure};
use crate::ffi::{self, MomentFormat, OptimOptions};

/// RMSprop, optionally centered and with momentum. The counterpart of `torch.optim.RMSprop`, of which PyTorch has no
/// fused version.
///
/// Source: Hinton, *Neural Networks for Machine Learning*, lecture 6e,
/// <https://www.cs.toronto.edu/~tijmen/csc321/slides/lecture_slides_lec6.pdf>; for the centered version Graves,
/// *Generating Sequences With Recurrent Neural Networks*, <https://arxiv.org/abs/1308.0850>.
///
/// # Examples
///
/// ```
/// use tch::Tensor;
/// use tch_amp::optim::RmsProp;
///
/// let w = Tensor::from_slice(&[1f64]).set_requires_grad(true);
/// let mut opt = RmsProp { alpha: 0.75, ..Default::default() }.build(&[w.shallow_clone()], 0.25)?;
/// opt.backward_step(&w.sum(None))?;
/// // The update is lr / (0.25 * 1).sqrt().
/// assert!((w.double_value(&[0]) - 0.5).abs() < 1e-6);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RmsProp {
    /// Smoothing constant: the coefficient used for computing the running average of the squared gradient; at least 0
    /// and less than 1. Defaults to 0.99.
    pub alpha: f64,
    /// Term added to the denominator to improve numerical stability; at least 0. Defaults to 1e-8.
    pub eps: f64,
    /// Weight decay (L2 penalty): this multiple of a weight is added to its gradient. At least 0. Defaults to 0.
    pub weight_decay: f64,
    /// Momentum factor, by which each step multiplies the momentum buffer; at least 0. Defaults to 0, which keeps no
    /// buffer.
    pub momentum: f64,
    /// Whether to divide by an estimate of the gradient's standard deviation instead of the root of its mean square.
    /// Defaults to `false`.
    pub centered: bool,
    /// Maximize the objective instead of minimizing it. Defaults to `false`.
    pub maximize: bool,
}

impl Default for RmsProp {
    fn default() -> Self {
        let (alpha, eps, weight_decay, momentum) = (0.99, 1e-8, 0.0, 0.0);
        Self { alpha, eps, weight_decay, momentum, centered: false, maximize: false }
    }
}

impl From<tch::nn::RmsProp> for RmsProp {
    fn from(config: tch::nn::RmsProp) -> Self {
        let tch::nn::RmsProp { alpha, eps, wd, momentum, centered } = config;
        Self { alpha, eps, weight_decay: wd, momentum, centered, ..Self::default() }
    }
}

impl Spec for RmsProp {
    fn check(&self, _lr: f64) -> Result<()> {
        let Self { alpha, eps, weight_decay, momentum, .. } = *self;
        ensure("alpha", alpha, (0.0..1.0).contains(&alpha), "from 0 to below 1")?;
        non_negative("eps", eps)?;
        non_negative("momentum", momentum)?;
        non_negative("weight_decay", weight_decay)
    }

    fn options(&self, lr: f64) -> OptimOptions {
        let Self { alpha, eps, weight_decay, momentum, centered, maximize } = *self;
        OptimOptions {
            algorithm: ffi::OPTIM_RMSPROP,
            lr,
            alpha,
            eps,
            weight_decay,
            momentum,
            centered,
            maximize,
            ..OptimOptions::default()
        }
    }

    fn tensors(&self, _kept_as: MomentFormat) -> &'static [StateTensor] {
        const {
            &[
                StateTensor::required("square_avg"),
                StateTensor::optional("momentum_buffer"),
                StateTensor::optional("grad_avg"),
            ]
        }
    }

    fn used(&self, _kept_as: MomentFormat, _dims: usize) -> [bool; KEPT] {
        [true, self.momentum != 0.0, self.centered]
    }

    fn set_weight_decay(&mut self, weight_decay: f64) {
        self.weight_decay = weight_decay;
    }

    fn momentum_mut(&mut self) -> Option<&mut f64> {
        Some(&mut self.momentum)
    }

    /// PyTorch has no fused RMSprop, and no option for it.
    fn torch_options(&self, _has_fused_kernels: bool) -> Fields {
        vec![
            float("momentum", self.momentum),
            float("alpha", self.alpha),
            float("eps", self.eps),
            flag("centered", self.centered),
            float("weight_decay", self.weight_decay),
            flag("capturable", false),
            ("foreach".into(), Value::None),
            flag("maximize", self.maximize),
            flag("differentiable", false),
        ]
    }

    fn is_in(group: TorchGroup<'_>) -> bool {
        group.has("centered")
    }
}

//! NAdam.

use serde::{Deserialize, Serialize};
use torch_files::Value;

use super::{
    Fields, KEPT, Spec, StateTensor, TorchGroup, check_betas, flag, float, non_negative, pair,
};
use crate::error::Result;
use crate::ffi::{self, MomentFormat, OptimOptions, StateShape};

/// NAdam: Adam with Nesterov momentum. The counterpart of `torch.optim.NAdam`, of which PyTorch has no fused version.
///
/// Unlike Adam it has no low-bit moments. On devices other than the CPU, a step launches three kernels for each
/// parameter in addition to those for all, since each has a momentum of its own.
///
/// Source: Dozat, *Incorporating Nesterov Momentum into Adam*, <https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ>;
/// for decoupled weight decay Loshchilov and Hutter, *Decoupled Weight Decay Regularization*,
/// <https://arxiv.org/abs/1711.05101>.
///
/// # Examples
///
/// ```
/// use tch::Tensor;
/// use tch_amp::optim::NAdam;
///
/// let w = Tensor::from_slice(&[1f64, 1.0]).set_requires_grad(true);
/// let mut opt = NAdam { betas: (0.0, 0.999), ..Default::default() }.build(&[w.shallow_clone()], 0.25)?;
/// opt.backward_step(&(&w * Tensor::from_slice(&[1000f64, -0.001])).sum(None))?;
/// // Without momentum, the first update is lr for a gradient of any size.
/// let [a, b] = [0, 1].map(|i| w.double_value(&[i]));
/// assert!((a - 0.75).abs() < 1e-4 && (b - 1.25).abs() < 1e-4);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct NAdam {
    /// Coefficients used for computing running averages of the gradient and its square; at least 0 and less than 1.
    /// Defaults to (0.9, 0.999).
    pub betas: (f64, f64),
    /// Term added to the denominator to improve numerical stability; at least 0. Defaults to 1e-8.
    pub eps: f64,
    /// Weight decay (L2 penalty): this multiple of a weight is added to its gradient, unless
    /// [`decoupled_weight_decay`](Self::decoupled_weight_decay) is set. At least 0. Defaults to 0.
    pub weight_decay: f64,
    /// Momentum decay: the momentum of step t is `betas.0 * (1 - 0.5 * 0.96.powf(t * momentum_decay))`. At least 0.
    /// Defaults to 0.004.
    pub momentum_decay: f64,
    /// Whether weight decay multiplies the weights by 1 - lr * weight_decay, as in AdamW. Defaults to `false`.
    pub decoupled_weight_decay: bool,
    /// Maximize the objective instead of minimizing it. Defaults to `false`.
    pub maximize: bool,
}

impl Default for NAdam {
    fn default() -> Self {
        Self {
            betas: (0.9, 0.999),
            eps: 1e-8,
            weight_decay: 0.0,
            momentum_decay: 4e-3,
            decoupled_weight_decay: false,
            maximize: false,
        }
    }
}

impl Spec for NAdam {
    fn check(&self, _lr: f64) -> Result<()> {
        check_betas(self.betas)?;
        non_negative("eps", self.eps)?;
        non_negative("weight_decay", self.weight_decay)?;
        non_negative("momentum_decay", self.momentum_decay)
    }

    fn options(&self, lr: f64) -> OptimOptions {
        OptimOptions {
            algorithm: ffi::OPTIM_NADAM,
            lr,
            betas: self.betas,
            eps: self.eps,
            weight_decay: self.weight_decay,
            momentum_decay: self.momentum_decay,
            decoupled_weight_decay: self.decoupled_weight_decay,
            maximize: self.maximize,
            ..OptimOptions::default()
        }
    }

    fn tensors(&self, _kept_as: MomentFormat) -> &'static [StateTensor] {
        const {
            &[
                StateTensor::required("exp_avg"),
                StateTensor::required("exp_avg_sq"),
                StateTensor::required("mu_product").shaped(StateShape::OfOne),
            ]
        }
    }

    fn used(&self, _kept_as: MomentFormat, _dims: usize) -> [bool; KEPT] {
        [true; KEPT]
    }

    fn initial(&self, place: usize) -> f64 {
        if place == 2 { 1.0 } else { 0.0 }
    }

    fn set_weight_decay(&mut self, weight_decay: f64) {
        self.weight_decay = weight_decay;
    }

    fn momentum_mut(&mut self) -> Option<&mut f64> {
        Some(&mut self.betas.0)
    }

    fn torch_options(&self, _has_fused_kernels: bool) -> Fields {
        vec![
            pair("betas", self.betas),
            float("eps", self.eps),
            float("weight_decay", self.weight_decay),
            float("momentum_decay", self.momentum_decay),
            flag("decoupled_weight_decay", self.decoupled_weight_decay),
            flag("maximize", self.maximize),
            ("foreach".into(), Value::None),
            flag("capturable", false),
            flag("differentiable", false),
        ]
    }

    fn is_in(group: TorchGroup<'_>) -> bool {
        group.has("momentum_decay")
    }
}

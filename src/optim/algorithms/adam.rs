//! Adam and AdamW.

use serde::{Deserialize, Serialize};

use super::{
    EXPONENTS, Fields, KEPT, LowBit, Spec, StateTensor, TorchGroup, check_betas, flag, float,
    fused, non_negative, pair,
};
use crate::error::Result;
use crate::ffi::{self, MomentFormat, OptimOptions};

/// AdamW: Adam with weight decay that acts on the weights directly, not through their gradients. The counterpart of
/// `torch.optim.AdamW` with `fused=True`.
///
/// Source: Loshchilov and Hutter, *Decoupled Weight Decay Regularization*, <https://arxiv.org/abs/1711.05101>.
///
/// # Examples
///
/// ```
/// use tch::Tensor;
/// use tch_amp::optim::AdamW;
///
/// let w = Tensor::from_slice(&[1f64]).set_requires_grad(true);
/// let mut opt = AdamW { weight_decay: 0.5, ..Default::default() }.build(&[w.shallow_clone()], 0.1)?;
/// opt.backward_step(&w.sum(None))?;
/// // Decay multiplies the weight by 0.95, and the first update is lr for a gradient of any size.
/// assert!((w.double_value(&[0]) - 0.85).abs() < 1e-6);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AdamW {
    /// Coefficients used for computing running averages of the gradient and its square; at least 0 and less than 1.
    /// Defaults to (0.9, 0.999).
    pub betas: (f64, f64),
    /// Term added to the denominator to improve numerical stability; at least 0. Defaults to 1e-8.
    pub eps: f64,
    /// Decoupled weight decay: each step first multiplies a weight by 1 - lr * weight_decay. At least 0. Defaults to
    /// 0.01.
    pub weight_decay: f64,
    /// Whether to use the AMSGrad variant, which divides by the maximum of all second averages so far
    /// (<https://openreview.net/forum?id=ryQu7f-RZ>). Defaults to `false`.
    pub amsgrad: bool,
    /// Maximize the objective instead of minimizing it. Defaults to `false`.
    pub maximize: bool,
}

/// Adam, whose weight decay is added to the gradients. The counterpart of `torch.optim.Adam` with `fused=True`.
///
/// Source: Kingma and Ba, *Adam: A Method for Stochastic Optimization*, <https://arxiv.org/abs/1412.6980>.
///
/// # Examples
///
/// ```
/// use tch::Tensor;
/// use tch_amp::optim::Adam;
///
/// let w = Tensor::from_slice(&[1f64, 1.0]).set_requires_grad(true);
/// let mut opt = Adam { betas: (0.9, 0.95), ..Default::default() }.build(&[w.shallow_clone()], 0.25)?;
/// opt.backward_step(&(&w * Tensor::from_slice(&[1000f64, -0.001])).sum(None))?;
/// // The first update is lr for a gradient of any size.
/// let [a, b] = [0, 1].map(|i| w.double_value(&[i]));
/// assert!((a - 0.75).abs() < 1e-4 && (b - 1.25).abs() < 1e-4);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Adam {
    /// Coefficients used for computing running averages of the gradient and its square; at least 0 and less than 1.
    /// Defaults to (0.9, 0.999).
    pub betas: (f64, f64),
    /// Term added to the denominator to improve numerical stability; at least 0. Defaults to 1e-8.
    pub eps: f64,
    /// Weight decay (L2 penalty): this multiple of a weight is added to its gradient. At least 0. Defaults to 0.
    pub weight_decay: f64,
    /// Whether to use the AMSGrad variant, which divides by the maximum of all second averages so far
    /// (<https://openreview.net/forum?id=ryQu7f-RZ>). Defaults to `false`.
    pub amsgrad: bool,
    /// Maximize the objective instead of minimizing it. Defaults to `false`.
    pub maximize: bool,
}

impl Default for AdamW {
    fn default() -> Self {
        let Adam { betas, eps, amsgrad, maximize, .. } = Adam::default();
        Self { betas, eps, weight_decay: 0.01, amsgrad, maximize }
    }
}

impl Default for Adam {
    fn default() -> Self {
        let betas = (0.9, 0.999);
        Self { betas, eps: 1e-8, weight_decay: 0.0, amsgrad: false, maximize: false }
    }
}

/// The state, whose last tensor AMSGrad or the 8-bit moments need.
const fn tensors(last: &'static str) -> [StateTensor; 3] {
    [
        StateTensor::required("exp_avg"),
        StateTensor::required("exp_avg_sq"),
        StateTensor::optional(last),
    ]
}

macro_rules! adam {
    ($config:ident $code:ident $is_decoupled:literal) => {
        impl From<tch::nn::$config> for $config {
            fn from(config: tch::nn::$config) -> Self {
                let tch::nn::$config { beta1, beta2, wd, eps, amsgrad } = config;
                Self { betas: (beta1, beta2), eps, weight_decay: wd, amsgrad, ..Self::default() }
            }
        }

        impl Spec for $config {
            fn check(&self, _lr: f64) -> Result<()> {
                check_betas(self.betas)?;
                non_negative("eps", self.eps)?;
                non_negative("weight_decay", self.weight_decay)
            }

            fn options(&self, lr: f64) -> OptimOptions {
                let Self { betas, eps, weight_decay, amsgrad, maximize } = *self;
                let algorithm = ffi::$code;
                let others = OptimOptions::default();
                OptimOptions {
                    algorithm,
                    lr,
                    betas,
                    eps,
                    weight_decay,
                    amsgrad,
                    maximize,
                    ..others
                }
            }

            fn tensors(&self, kept_as: MomentFormat) -> &'static [StateTensor] {
                if kept_as == MomentFormat::EightBit {
                    const { &tensors(EXPONENTS) }
                } else {
                    const { &tensors("max_exp_avg_sq") }
                }
            }

            fn used(&self, kept_as: MomentFormat, _dims: usize) -> [bool; KEPT] {
                [true, true, self.amsgrad || kept_as == MomentFormat::EightBit]
            }

            fn set_weight_decay(&mut self, weight_decay: f64) {
                self.weight_decay = weight_decay;
            }

            fn momentum_mut(&mut self) -> Option<&mut f64> {
                Some(&mut self.betas.0)
            }

            fn betas(&self) -> (f64, f64) {
                self.betas
            }

            fn low_bit(&self, _kept_as: MomentFormat) -> LowBit {
                if self.amsgrad { LowBit::Refused(AMSGRAD) } else { LowBit::Possible }
            }

            fn torch_options(&self, has_fused_kernels: bool) -> Fields {
                let Self { betas, eps, weight_decay, amsgrad, maximize } = *self;
                let own = [
                    pair("betas", betas),
                    float("eps", eps),
                    float("weight_decay", weight_decay),
                    flag("amsgrad", amsgrad),
                    flag("maximize", maximize),
                    flag("capturable", false),
                    flag("decoupled_weight_decay", $is_decoupled),
                ];
                own.into_iter().chain(fused(has_fused_kernels)).collect()
            }

            fn is_in(group: TorchGroup<'_>) -> bool {
                // Before PyTorch 2.7 both had the same options.
                (group.has("amsgrad") || group.is_fused_adam())
                    && group.is_true("decoupled_weight_decay") == $is_decoupled
            }
        }
    };
}

adam!(AdamW OPTIM_ADAMW true);
adam!(Adam OPTIM_ADAM false);

/// Why `amsgrad` has no low-bit moments.
const AMSGRAD: &str = "must be `MomentDtype::F32` with `amsgrad`: the maximum of dithered second moments could only grow";

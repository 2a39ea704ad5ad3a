//! The options of the algorithms, their ranges, and what a step of each tells the shim.

use serde::{Deserialize, Serialize};

use crate::error::{Result, ensure};
use crate::ffi::{OptimAlgorithm, OptimOptions};

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

/// Stochastic gradient descent, optionally with momentum. The counterpart of `torch.optim.SGD` with `fused=True`.
///
/// Source: Sutskever et al., *On the importance of initialization and momentum in deep learning*. As in PyTorch, the
/// learning rate multiplies the whole momentum buffer at each step, not each gradient as it enters the buffer.
///
/// # Examples
///
/// ```
/// use tch::Tensor;
/// use tch_amp::optim::Sgd;
///
/// let w = Tensor::from_slice(&[1f32]).set_requires_grad(true);
/// let mut opt = Sgd { momentum: 0.5, ..Default::default() }.build(&[w.shallow_clone()], 0.25)?;
/// opt.backward_step(&w.sum(None))?;
/// assert_eq!(w.double_value(&[0]), 0.75);
/// opt.backward_step(&w.sum(None))?;
/// assert_eq!(w.double_value(&[0]), 0.375);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sgd {
    /// Momentum factor, by which each step multiplies the momentum buffer; at least 0. Defaults to 0, which keeps no
    /// buffer.
    pub momentum: f64,
    /// Dampening for momentum: all gradients but the first enter the momentum buffer multiplied by 1 - dampening.
    /// Defaults to 0.
    pub dampening: f64,
    /// Weight decay (L2 penalty): this multiple of a weight is added to its gradient. At least 0. Defaults to 0.
    pub weight_decay: f64,
    /// Whether to use Nesterov momentum, which requires momentum and no dampening. Defaults to `false`.
    pub nesterov: bool,
    /// Maximize the objective instead of minimizing it. Defaults to `false`.
    pub maximize: bool,
}

/// Adagrad. The counterpart of `torch.optim.Adagrad` with `fused=True`; it also runs on GPUs if libtorch has the kernel
/// for them.
///
/// Source: Duchi et al., *Adaptive Subgradient Methods for Online Learning and Stochastic Optimization*.
///
/// # Examples
///
/// ```
/// use tch::Tensor;
/// use tch_amp::optim::Adagrad;
///
/// let w = Tensor::from_slice(&[1f64]).set_requires_grad(true);
/// let mut opt = Adagrad { initial_accumulator_value: 3.0, ..Default::default() }.build(&[w.shallow_clone()], 0.5)?;
/// opt.backward_step(&w.sum(None))?;
/// // The update is lr / (3 + 1).sqrt().
/// assert!((w.double_value(&[0]) - 0.75).abs() < 1e-6);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Adagrad {
    /// Learning rate decay: step t uses lr / (1 + (t - 1) * lr_decay). At least 0. Defaults to 0.
    pub lr_decay: f64,
    /// Weight decay (L2 penalty): this multiple of a weight is added to its gradient. At least 0. Defaults to 0.
    pub weight_decay: f64,
    /// Initial value of the sums of squared gradients; at least 0. Defaults to 0.
    pub initial_accumulator_value: f64,
    /// Term added to the denominator to improve numerical stability; at least 0. Defaults to 1e-10.
    pub eps: f64,
    /// Maximize the objective instead of minimizing it. Defaults to `false`.
    pub maximize: bool,
}

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

/// Lion, whose update is the sign of a running average of the gradient. PyTorch has no counterpart: the options and the
/// state have the names of its authors' implementation for PyTorch.
///
/// Each element moves by the learning rate, whatever the size of its gradient, so that Lion needs a learning rate 3 to
/// 10 times smaller than AdamW does, and a weight decay that is larger by the same factor.
///
/// Source: Chen et al., *Symbolic Discovery of Optimization Algorithms*, <https://arxiv.org/abs/2302.06675>.
///
/// # Examples
///
/// ```
/// use tch::Tensor;
/// use tch_amp::optim::Lion;
///
/// let w = Tensor::from_slice(&[1f64, 1.0]).set_requires_grad(true);
/// let mut opt = Lion { weight_decay: 0.5, ..Default::default() }.build(&[w.shallow_clone()], 0.25)?;
/// opt.backward_step(&(&w * Tensor::from_slice(&[1000f64, -0.001])).sum(None))?;
/// // Decay multiplies the weights by 0.875, and the update is lr for a gradient of any size.
/// assert_eq!([0, 1].map(|i| w.double_value(&[i])), [0.625, 1.125]);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Lion {
    /// Coefficients used for computing the update and the running average of the gradient; at least 0 and less than 1.
    /// Defaults to (0.9, 0.99).
    pub betas: (f64, f64),
    /// Decoupled weight decay: each step first multiplies a weight by 1 - lr * weight_decay. At least 0. Defaults to 0.
    pub weight_decay: f64,
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

impl Default for Adagrad {
    fn default() -> Self {
        Self {
            lr_decay: 0.0,
            weight_decay: 0.0,
            initial_accumulator_value: 0.0,
            eps: 1e-10,
            maximize: false,
        }
    }
}

impl Default for RmsProp {
    fn default() -> Self {
        let (alpha, eps, weight_decay, momentum) = (0.99, 1e-8, 0.0, 0.0);
        Self { alpha, eps, weight_decay, momentum, centered: false, maximize: false }
    }
}

impl Default for Lion {
    fn default() -> Self {
        Self { betas: (0.9, 0.99), weight_decay: 0.0, maximize: false }
    }
}

macro_rules! adam {
    ($($config:ident)*) => {$(
        impl From<tch::nn::$config> for $config {
            fn from(config: tch::nn::$config) -> Self {
                let tch::nn::$config { beta1, beta2, wd, eps, amsgrad } = config;
                Self { betas: (beta1, beta2), eps, weight_decay: wd, amsgrad, ..Self::default() }
            }
        }

        impl $config {
            pub(super) fn check(self) -> Result<()> {
                let Self { betas, eps, weight_decay, .. } = self;
                check_betas(betas)?;
                non_negative("eps", eps)?;
                non_negative("weight_decay", weight_decay)
            }

            pub(super) fn options(self, lr: f64) -> OptimOptions {
                let Self { betas, eps, weight_decay, amsgrad, maximize } = self;
                let algorithm = OptimAlgorithm::$config;
                OptimOptions {
                    algorithm,
                    lr,
                    betas,
                    eps,
                    weight_decay,
                    amsgrad,
                    maximize,
                    ..OptimOptions::default()
                }
            }
        }
    )*};
}

adam!(AdamW Adam);

impl From<tch::nn::Sgd> for Sgd {
    fn from(config: tch::nn::Sgd) -> Self {
        let tch::nn::Sgd { momentum, dampening, wd, nesterov } = config;
        Self { momentum, dampening, weight_decay: wd, nesterov, ..Self::default() }
    }
}

impl From<tch::nn::RmsProp> for RmsProp {
    fn from(config: tch::nn::RmsProp) -> Self {
        let tch::nn::RmsProp { alpha, eps, wd, momentum, centered } = config;
        Self { alpha, eps, weight_decay: wd, momentum, centered, ..Self::default() }
    }
}

impl Sgd {
    pub(super) fn check(self) -> Result<()> {
        let Self { momentum, dampening, weight_decay, nesterov, .. } = self;
        non_negative("momentum", momentum)?;
        ensure("dampening", dampening, dampening.is_finite(), "finite")?;
        let fits = !nesterov || momentum > 0.0;
        ensure("momentum", momentum, fits, "more than 0 with nesterov")?;
        let fits = !nesterov || dampening == 0.0;
        ensure("dampening", dampening, fits, "0 with nesterov")?;
        non_negative("weight_decay", weight_decay)
    }

    pub(super) fn options(self, lr: f64) -> OptimOptions {
        let Self { momentum, dampening, weight_decay, nesterov, maximize } = self;
        OptimOptions {
            algorithm: OptimAlgorithm::Sgd,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize,
            ..OptimOptions::default()
        }
    }
}

impl Adagrad {
    pub(super) fn check(self) -> Result<()> {
        non_negative("lr_decay", self.lr_decay)?;
        non_negative("initial_accumulator_value", self.initial_accumulator_value)?;
        non_negative("eps", self.eps)?;
        non_negative("weight_decay", self.weight_decay)
    }

    pub(super) fn options(self, lr: f64) -> OptimOptions {
        let Self { lr_decay, weight_decay, initial_accumulator_value: _, eps, maximize } = self;
        OptimOptions {
            algorithm: OptimAlgorithm::Adagrad,
            lr,
            lr_decay,
            weight_decay,
            eps,
            maximize,
            ..OptimOptions::default()
        }
    }
}

impl RmsProp {
    pub(super) fn check(self) -> Result<()> {
        let Self { alpha, eps, weight_decay, momentum, .. } = self;
        ensure("alpha", alpha, (0.0..1.0).contains(&alpha), "from 0 to below 1")?;
        non_negative("eps", eps)?;
        non_negative("momentum", momentum)?;
        non_negative("weight_decay", weight_decay)
    }

    pub(super) fn options(self, lr: f64) -> OptimOptions {
        let Self { alpha, eps, weight_decay, momentum, centered, maximize } = self;
        OptimOptions {
            algorithm: OptimAlgorithm::RmsProp,
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
}

impl Lion {
    pub(super) fn check(self) -> Result<()> {
        check_betas(self.betas)?;
        non_negative("weight_decay", self.weight_decay)
    }

    pub(super) fn options(self, lr: f64) -> OptimOptions {
        let Self { betas, weight_decay, maximize } = self;
        OptimOptions {
            algorithm: OptimAlgorithm::Lion,
            lr,
            betas,
            weight_decay,
            maximize,
            ..OptimOptions::default()
        }
    }
}

pub(super) fn non_negative(field: &'static str, value: f64) -> Result<()> {
    ensure(field, value, value >= 0.0 && value.is_finite(), "finite and at least 0")
}

fn check_betas((first, second): (f64, f64)) -> Result<()> {
    for beta in [first, second] {
        ensure("betas", beta, (0.0..1.0).contains(&beta), "from 0 to below 1")?;
    }
    Ok(())
}

/// Muon, which orthogonalizes the momentum of each matrix by Newton-Schulz iterations, and AdamW for all parameters
/// that are not matrices. The counterpart of `torch.optim.Muon` and `torch.optim.AdamW` in one optimizer.
///
/// A parameter with two dimensions is a matrix. Biases, norms and the filters of convolutions, which have more
/// dimensions, are stepped by AdamW: Muon's authors flatten filters to matrices, and PyTorch's Muon refuses them.
/// Embeddings and the last layer are matrices, too, but train better with AdamW: give them a group whose
/// [`use_muon`](Self::use_muon) is `false`, as below.
///
/// The learning rate of a group is Muon's, and [`adamw_lr_factor`](Self::adamw_lr_factor) times as much is AdamW's, so
/// that a schedule drives both. The momentum that
/// [`set_momentum`](crate::optim::Optimizer::set_momentum) sets is Muon's, and the weight decay that
/// [`set_weight_decay`](crate::optim::Optimizer::set_weight_decay) sets is that of both. A parameter that moves from
/// one of the two to the other starts with a new state.
///
/// The products of matrices are computed in bf16, as in PyTorch. A step allocates the orthogonalized momenta of all
/// matrices, 2 bytes for each of their numbers, before it changes anything. With
/// [`MomentDtype::BFloat16`](crate::optim::MomentDtype::BFloat16) the momentum takes 2 bytes for each number instead of
/// 4.
///
/// Source: Jordan et al., *Muon: An optimizer for hidden layers in neural networks*,
/// <https://kellerjordan.github.io/posts/muon/>; for the learning rate that matches AdamW's Liu et al., *Muon is
/// Scalable for LLM Training*, <https://arxiv.org/abs/2502.16982>.
///
/// # Examples
///
/// ```
/// use tch::{Device, Kind, Tensor, nn};
/// use tch_amp::optim::{AdjustLr, Muon, ParamGroup};
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let embedding = nn::embedding(vs.root() / "embedding", 100, 8, Default::default());
/// let hidden = nn::linear(vs.root() / "hidden", 8, 8, Default::default());
/// let head = nn::linear(vs.root() / "head", 8, 100, Default::default());
///
/// // With this adjustment, both take the learning rate of AdamW.
/// let muon = Muon { adjust_lr_fn: AdjustLr::MatchRmsAdamW, ..Default::default() };
/// let mut opt = muon.build(&vs, 1e-3)?;
/// opt.assign_group(1, &["embedding.*", "head.*"])?;
/// opt.set_param_group(1, ParamGroup::new(1e-3, Muon { use_muon: false, ..muon }))?;
///
/// let words = Tensor::from_slice(&[3i64, 14, 15]);
/// let logits = words.apply(&embedding).apply(&hidden).relu().apply(&head);
/// opt.backward_step(&logits.cross_entropy_for_logits(&words))?;
/// let state = opt.state_dict()?.state;
/// assert!(state["hidden.weight"].contains_key("momentum_buffer"));
/// assert!(state["hidden.bias"].contains_key("exp_avg"));
/// assert!(state["head.weight"].contains_key("exp_avg"));
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Muon {
    /// Momentum factor: each step moves the momentum buffer towards the gradient by the fraction 1 - momentum.
    /// At least 0 and less than 1. Defaults to 0.95.
    pub momentum: f64,
    /// Whether to use Nesterov momentum. Defaults to `true`.
    pub nesterov: bool,
    /// Decoupled weight decay of matrices: each step first multiplies a weight by 1 - lr * weight_decay. At least 0.
    /// Defaults to 0.1.
    pub weight_decay: f64,
    /// Coefficients a, b and c of the iteration: X becomes aX + (bA + cA²)X, where A is X Xᵀ. Defaults to (3.4445,
    /// -4.775, 2.0315).
    pub ns_coefficients: (f64, f64, f64),
    /// Number of Newton-Schulz iterations, less than 100. Defaults to 5.
    pub ns_steps: u32,
    /// The smallest norm that a momentum is divided by before the iterations; more than 0. Defaults to 1e-7.
    pub eps: f64,
    /// How the learning rate depends on the shape of a matrix. Defaults to [`AdjustLr::Original`].
    pub adjust_lr_fn: AdjustLr,
    /// Whether matrices are stepped by Muon. If `false`, AdamW steps all parameters of the group. Defaults to `true`.
    pub use_muon: bool,
    /// The options of AdamW for all other parameters; `maximize` must be `false`, since Muon does not have it.
    pub adamw: AdamW,
    /// The learning rate of AdamW divided by that of the group; at least 0. Defaults to 1.
    pub adamw_lr_factor: f64,
}

/// How [`Muon`] adjusts the learning rate to the shape of a matrix, so that the size of its updates does not depend on
/// it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum AdjustLr {
    /// Multiplies it by sqrt(max(1, rows / columns)), as Muon's authors do. Corresponds to `"original"` in PyTorch.
    #[default]
    #[serde(rename = "original")]
    Original,
    /// Multiplies it by 0.2 * sqrt(max(rows, columns)), with which updates are as large as those of AdamW, and AdamW's
    /// learning rate and weight decay fit. Corresponds to `"match_rms_adamw"` in PyTorch.
    #[serde(rename = "match_rms_adamw")]
    MatchRmsAdamW,
}

impl Default for Muon {
    fn default() -> Self {
        Self {
            momentum: 0.95,
            nesterov: true,
            weight_decay: 0.1,
            ns_coefficients: (3.4445, -4.775, 2.0315),
            ns_steps: 5,
            eps: 1e-7,
            adjust_lr_fn: AdjustLr::Original,
            use_muon: true,
            adamw: AdamW::default(),
            adamw_lr_factor: 1.0,
        }
    }
}

impl Muon {
    pub(super) fn check(&self, lr: f64) -> Result<()> {
        let Self { momentum, weight_decay, ns_coefficients: (a, b, c), ns_steps, eps, .. } = *self;
        ensure("momentum", momentum, (0.0..1.0).contains(&momentum), "from 0 to below 1")?;
        non_negative("weight_decay", weight_decay)?;
        for coefficient in [a, b, c] {
            ensure("ns_coefficients", coefficient, coefficient.is_finite(), "finite")?;
        }
        ensure("ns_steps", ns_steps.into(), ns_steps < 100, "less than 100")?;
        ensure("eps", eps, eps > 0.0 && eps.is_finite(), "finite and more than 0")?;
        non_negative("adamw_lr_factor", self.adamw_lr_factor)?;
        let maximize = f64::from(u8::from(self.adamw.maximize));
        ensure(
            "adamw.maximize",
            maximize,
            !self.adamw.maximize,
            "false, since Muon does not have it",
        )?;
        non_negative("lr", lr * self.adamw_lr_factor)?;
        self.adamw.check()
    }

    /// The options of a step of matrices, as the shim takes them.
    pub(super) fn options(&self, lr: f64) -> OptimOptions {
        OptimOptions {
            algorithm: OptimAlgorithm::Muon,
            lr,
            momentum: self.momentum,
            nesterov: self.nesterov,
            weight_decay: self.weight_decay,
            ns_coefficients: self.ns_coefficients,
            ns_steps: u8::try_from(self.ns_steps).unwrap_or(u8::MAX),
            eps: self.eps,
            match_rms_adamw: self.adjust_lr_fn == AdjustLr::MatchRmsAdamW,
            ..OptimOptions::default()
        }
    }
}

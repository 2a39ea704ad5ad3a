//! The options of the fused optimizers.

use serde::{Deserialize, Serialize};

use crate::builder::builder;
#[cfg(doc)]
use crate::error::{Error, OptimizerError};
use crate::error::{Result, ensure};
use crate::ffi::{OptimAlgorithm, OptimOptions};
use crate::optim::{IntoParameters, Lion, MasterWeights, Muon, Optimizer, RmsProp};

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
/// let mut opt = AdamW::default().weight_decay(0.5).build(&[w.shallow_clone()], 0.1)?;
/// opt.backward_step(&w.sum(None))?;
/// // Decay multiplies the weight by 0.95, and the first update is lr for a gradient of any size.
/// assert!((w.double_value(&[0]) - 0.85).abs() < 1e-6);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
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

builder!(AdamW { betas: (f64, f64), eps: f64, weight_decay: f64, amsgrad: bool, maximize: bool });

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
/// let mut opt = Adam::default().betas((0.9, 0.95)).build(&[w.shallow_clone()], 0.25)?;
/// opt.backward_step(&(&w * Tensor::from_slice(&[1000f64, -0.001])).sum(None))?;
/// // The first update is lr for a gradient of any size.
/// let [a, b] = [0, 1].map(|i| w.double_value(&[i]));
/// assert!((a - 0.75).abs() < 1e-4 && (b - 1.25).abs() < 1e-4);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
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

builder!(Adam { betas: (f64, f64), eps: f64, weight_decay: f64, amsgrad: bool, maximize: bool });

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
/// let mut opt = Sgd::default().momentum(0.5).build(&[w.shallow_clone()], 0.25)?;
/// opt.backward_step(&w.sum(None))?;
/// assert_eq!(w.double_value(&[0]), 0.75);
/// opt.backward_step(&w.sum(None))?;
/// assert_eq!(w.double_value(&[0]), 0.375);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
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

builder!(Sgd { momentum: f64, dampening: f64, weight_decay: f64, nesterov: bool, maximize: bool });

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
/// let mut opt = Adagrad::default().initial_accumulator_value(3.0).build(&[w.shallow_clone()], 0.5)?;
/// opt.backward_step(&w.sum(None))?;
/// // The update is lr / (3 + 1).sqrt().
/// assert!((w.double_value(&[0]) - 0.75).abs() < 1e-6);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
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

builder!(Adagrad {
    lr_decay: f64,
    weight_decay: f64,
    initial_accumulator_value: f64,
    eps: f64,
    maximize: bool
});

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

/// The algorithm of a fused optimizer, with its options.
///
/// # Examples
///
/// ```
/// use tch::{Device, nn};
/// use tch_amp::optim::{AdamW, Algorithm};
///
/// let configured = r#"{"algorithm": "AdamW", "weight_decay": 0.1}"#;
/// let algorithm: Algorithm = serde_json::from_str(configured)?;
/// assert_eq!(algorithm, AdamW::default().weight_decay(0.1).into());
/// let opt = algorithm.build(&nn::VarStore::new(Device::Cpu), 1e-3)?;
/// assert_eq!(opt.param_group(0)?.algorithm, algorithm);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "algorithm")]
#[non_exhaustive]
pub enum Algorithm {
    /// [`AdamW`].
    AdamW(AdamW),
    /// [`Adam`].
    Adam(Adam),
    /// [`Sgd`].
    Sgd(Sgd),
    /// [`Adagrad`].
    Adagrad(Adagrad),
    /// [`RmsProp`].
    RmsProp(RmsProp),
    /// [`Lion`].
    Lion(Lion),
    /// [`Muon`].
    Muon(Muon),
}

macro_rules! build {
    ($($config:ident)*) => {$(
        impl $config {
            /// Makes an optimizer with the learning rate `lr` for the trainable variables of a `VarStore`, or for a
            /// list of tensors with or without names, in any of the forms of [`IntoParameters`].
            ///
            /// Tensors of a list that do not require a gradient are kept but not updated, like frozen parameters.
            ///
            /// The variables of a `VarStore` belong to the groups that their paths were given
            /// ([`set_group`](tch::nn::Path::set_group)). Variables that are added to it later are taken up as well.
            ///
            /// # Errors
            ///
            /// [`Error::InvalidArgument`] for an option or a learning rate outside its range;
            /// [`OptimizerError::SharedMemory`] for two tensors that share memory; [`OptimizerError::Parameter`] for a
            /// tensor that is not a floating-point tensor, is not a leaf or is listed twice;
            /// [`OptimizerError::NoParameters`] for an empty list.
            pub fn build(self, parameters: impl IntoParameters, lr: f64) -> Result<Optimizer> {
                Algorithm::from(self).build(parameters, lr)
            }

            /// Sets how the optimizer updates half-precision parameters. Set the options of the algorithm before: the
            /// builder that is returned does not have them.
            pub fn master_weights(self, masters: MasterWeights) -> OptimizerBuilder {
                Algorithm::from(self).master_weights(masters)
            }
        }

        impl From<$config> for Algorithm {
            fn from(config: $config) -> Self {
                Self::$config(config)
            }
        }
    )*};
}

build!(AdamW Adam Sgd Adagrad RmsProp Lion Muon);

macro_rules! from_tch {
    ($($config:ident)*) => {$(
        impl From<tch::nn::$config> for $config {
            fn from(config: tch::nn::$config) -> Self {
                let tch::nn::$config { beta1, beta2, wd, eps, amsgrad } = config;
                Self { betas: (beta1, beta2), eps, weight_decay: wd, amsgrad, ..Self::default() }
            }
        }
    )*};
}

/// Builds an optimizer with options beyond those of its [`Algorithm`]: the mode of its master weights.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use = "an optimizer is made by `build`"]
pub struct OptimizerBuilder {
    algorithm: Algorithm,
    masters: MasterWeights,
}

impl OptimizerBuilder {
    /// Makes the optimizer update half-precision parameters in f32, in the given mode.
    pub fn master_weights(self, masters: MasterWeights) -> Self {
        Self { masters, ..self }
    }

    /// Makes the optimizer, like [`AdamW::build`].
    ///
    /// # Errors
    ///
    /// The same as [`AdamW::build`].
    pub fn build(self, parameters: impl IntoParameters, lr: f64) -> Result<Optimizer> {
        Optimizer::new(self.algorithm, parameters, lr, self.masters)
    }
}

impl Algorithm {
    /// Makes an optimizer without master weights, like [`AdamW::build`].
    ///
    /// # Errors
    ///
    /// The same as [`AdamW::build`].
    pub fn build(self, parameters: impl IntoParameters, lr: f64) -> Result<Optimizer> {
        self.master_weights(MasterWeights::None).build(parameters, lr)
    }

    /// Makes the optimizer update half-precision parameters in f32, in the given mode.
    pub fn master_weights(self, masters: MasterWeights) -> OptimizerBuilder {
        OptimizerBuilder { algorithm: self, masters }
    }
}

from_tch!(AdamW Adam);

impl From<tch::nn::Sgd> for Sgd {
    fn from(config: tch::nn::Sgd) -> Self {
        let tch::nn::Sgd { momentum, dampening, wd, nesterov } = config;
        Self { momentum, dampening, weight_decay: wd, nesterov, ..Self::default() }
    }
}

pub(crate) fn non_negative(field: &'static str, value: f64) -> Result<()> {
    ensure(field, value, value >= 0.0 && value.is_finite(), "finite and at least 0")
}

fn check_betas((first, second): (f64, f64)) -> Result<()> {
    for beta in [first, second] {
        ensure("betas", beta, (0.0..1.0).contains(&beta), "from 0 to below 1")?;
    }
    Ok(())
}

impl Algorithm {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::AdamW(_) => "AdamW",
            Self::Adam(_) => "Adam",
            Self::Sgd(_) => "Sgd",
            Self::Adagrad(_) => "Adagrad",
            Self::RmsProp(_) => "RmsProp",
            Self::Lion(_) => "Lion",
            Self::Muon(_) => "Muon",
        }
    }

    pub(crate) fn check(&self, lr: f64) -> Result<()> {
        non_negative("lr", lr)?;
        match *self {
            Self::AdamW(AdamW { betas, eps, weight_decay, .. })
            | Self::Adam(Adam { betas, eps, weight_decay, .. }) => {
                check_betas(betas)?;
                non_negative("eps", eps)?;
                non_negative("weight_decay", weight_decay)
            }
            Self::Sgd(Sgd { momentum, dampening, weight_decay, nesterov, .. }) => {
                non_negative("momentum", momentum)?;
                ensure("dampening", dampening, dampening.is_finite(), "finite")?;
                let fits = !nesterov || momentum > 0.0;
                ensure("momentum", momentum, fits, "more than 0 with nesterov")?;
                let fits = !nesterov || dampening == 0.0;
                ensure("dampening", dampening, fits, "0 with nesterov")?;
                non_negative("weight_decay", weight_decay)
            }
            Self::Adagrad(Adagrad {
                lr_decay,
                weight_decay,
                initial_accumulator_value,
                eps,
                ..
            }) => {
                non_negative("lr_decay", lr_decay)?;
                non_negative("initial_accumulator_value", initial_accumulator_value)?;
                non_negative("eps", eps)?;
                non_negative("weight_decay", weight_decay)
            }
            Self::RmsProp(RmsProp { alpha, eps, weight_decay, momentum, .. }) => {
                ensure("alpha", alpha, (0.0..1.0).contains(&alpha), "from 0 to below 1")?;
                non_negative("eps", eps)?;
                non_negative("momentum", momentum)?;
                non_negative("weight_decay", weight_decay)
            }
            Self::Lion(Lion { betas, weight_decay, .. }) => {
                check_betas(betas)?;
                non_negative("weight_decay", weight_decay)
            }
            Self::Muon(muon) => muon.check(lr),
        }
    }

    /// The options of a step, as the shim takes them.
    pub(crate) fn options(&self, lr: f64) -> OptimOptions {
        let adam = |algorithm, betas, eps, weight_decay, amsgrad, maximize| OptimOptions {
            algorithm,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize,
            ..Default::default()
        };
        match *self {
            Self::AdamW(AdamW { betas, eps, weight_decay, amsgrad, maximize }) => {
                adam(OptimAlgorithm::AdamW, betas, eps, weight_decay, amsgrad, maximize)
            }
            Self::Adam(Adam { betas, eps, weight_decay, amsgrad, maximize }) => {
                adam(OptimAlgorithm::Adam, betas, eps, weight_decay, amsgrad, maximize)
            }
            Self::Sgd(Sgd { momentum, dampening, weight_decay, nesterov, maximize }) => {
                OptimOptions {
                    algorithm: OptimAlgorithm::Sgd,
                    lr,
                    momentum,
                    dampening,
                    weight_decay,
                    nesterov,
                    maximize,
                    ..Default::default()
                }
            }
            Self::Adagrad(Adagrad { lr_decay, weight_decay, eps, maximize, .. }) => OptimOptions {
                algorithm: OptimAlgorithm::Adagrad,
                lr,
                lr_decay,
                weight_decay,
                eps,
                maximize,
                ..Default::default()
            },
            Self::RmsProp(RmsProp { alpha, eps, weight_decay, momentum, centered, maximize }) => {
                OptimOptions {
                    algorithm: OptimAlgorithm::RmsProp,
                    lr,
                    alpha,
                    eps,
                    weight_decay,
                    momentum,
                    centered,
                    maximize,
                    ..Default::default()
                }
            }
            Self::Lion(Lion { betas, weight_decay, maximize }) => OptimOptions {
                algorithm: OptimAlgorithm::Lion,
                lr,
                betas,
                weight_decay,
                maximize,
                ..Default::default()
            },
            Self::Muon(muon) => muon.options(lr),
        }
    }

    /// Sets the weight decay, for Muon also that of its AdamW.
    pub(crate) fn set_weight_decay(&mut self, weight_decay: f64) {
        match self {
            Self::AdamW(config) => config.weight_decay = weight_decay,
            Self::Adam(config) => config.weight_decay = weight_decay,
            Self::Sgd(config) => config.weight_decay = weight_decay,
            Self::Adagrad(config) => config.weight_decay = weight_decay,
            Self::RmsProp(config) => config.weight_decay = weight_decay,
            Self::Lion(config) => config.weight_decay = weight_decay,
            Self::Muon(config) => {
                (config.weight_decay, config.adamw.weight_decay) = (weight_decay, weight_decay);
            }
        }
    }

    /// The momentum; for Adam, AdamW and Lion the first beta, as in tch.
    pub(crate) fn momentum(mut self) -> Option<f64> {
        self.momentum_mut().map(|momentum| *momentum)
    }

    /// The momentum; for Adam, AdamW and Lion the first beta, as in tch.
    pub(crate) fn momentum_mut(&mut self) -> Option<&mut f64> {
        match self {
            Self::AdamW(config) => Some(&mut config.betas.0),
            Self::Adam(config) => Some(&mut config.betas.0),
            Self::Sgd(config) => Some(&mut config.momentum),
            Self::Adagrad(_) => None,
            Self::RmsProp(config) => Some(&mut config.momentum),
            Self::Lion(config) => Some(&mut config.betas.0),
            Self::Muon(config) => Some(&mut config.momentum),
        }
    }
}

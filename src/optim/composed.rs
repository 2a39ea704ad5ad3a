//! The options of RMSprop and Lion, for which libtorch has no fused kernels.

use serde::{Deserialize, Serialize};

use crate::builder::builder;

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
/// let mut opt = RmsProp::default().alpha(0.75).build(&[w.shallow_clone()], 0.25)?;
/// opt.backward_step(&w.sum(None))?;
/// // The update is lr / (0.25 * 1).sqrt().
/// assert!((w.double_value(&[0]) - 0.5).abs() < 1e-6);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
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

builder!(RmsProp {
    alpha: f64,
    eps: f64,
    weight_decay: f64,
    momentum: f64,
    centered: bool,
    maximize: bool
});

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
/// let mut opt = Lion::default().weight_decay(0.5).build(&[w.shallow_clone()], 0.25)?;
/// opt.backward_step(&(&w * Tensor::from_slice(&[1000f64, -0.001])).sum(None))?;
/// // Decay multiplies the weights by 0.875, and the update is lr for a gradient of any size.
/// assert_eq!([0, 1].map(|i| w.double_value(&[i])), [0.625, 1.125]);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Lion {
    /// Coefficients used for computing the update and the running average of the gradient; at least 0 and less than 1.
    /// Defaults to (0.9, 0.99).
    pub betas: (f64, f64),
    /// Decoupled weight decay: each step first multiplies a weight by 1 - lr * weight_decay. At least 0. Defaults to 0.
    pub weight_decay: f64,
    /// Maximize the objective instead of minimizing it. Defaults to `false`.
    pub maximize: bool,
}

builder!(Lion { betas: (f64, f64), weight_decay: f64, maximize: bool });

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

impl From<tch::nn::RmsProp> for RmsProp {
    fn from(config: tch::nn::RmsProp) -> Self {
        let tch::nn::RmsProp { alpha, eps, wd, momentum, centered } = config;
        Self { alpha, eps, weight_decay: wd, momentum, centered, ..Self::default() }
    }
}

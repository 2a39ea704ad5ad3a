//! Stochastic gradient descent.

use serde::{Deserialize, Serialize};

use super::{Fields, KEPT, Spec, StateTensor, TorchGroup, flag, float, fused, non_negative};
use crate::error::{Result, ensure};
use crate::ffi::{self, MomentFormat, OptimOptions};

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

impl From<tch::nn::Sgd> for Sgd {
    fn from(config: tch::nn::Sgd) -> Self {
        let tch::nn::Sgd { momentum, dampening, wd, nesterov } = config;
        Self { momentum, dampening, weight_decay: wd, nesterov, ..Self::default() }
    }
}

impl Spec for Sgd {
    fn check(&self, _lr: f64) -> Result<()> {
        let Self { momentum, dampening, weight_decay, nesterov, .. } = *self;
        non_negative("momentum", momentum)?;
        ensure("dampening", dampening, dampening.is_finite(), "finite")?;
        let fits = !nesterov || momentum > 0.0;
        ensure("momentum", momentum, fits, "more than 0 with nesterov")?;
        let fits = !nesterov || dampening == 0.0;
        ensure("dampening", dampening, fits, "0 with nesterov")?;
        non_negative("weight_decay", weight_decay)
    }

    fn options(&self, lr: f64) -> OptimOptions {
        let Self { momentum, dampening, weight_decay, nesterov, maximize } = *self;
        OptimOptions {
            algorithm: ffi::OPTIM_SGD,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize,
            ..OptimOptions::default()
        }
    }

    fn tensors(&self, _kept_as: MomentFormat) -> &'static [StateTensor] {
        const { &[StateTensor::optional("momentum_buffer")] }
    }

    fn used(&self, _kept_as: MomentFormat, _dims: usize) -> [bool; KEPT] {
        [self.starts_with_gradient(), false, false]
    }

    fn counts_steps(&self) -> bool {
        false
    }

    fn starts_with_gradient(&self) -> bool {
        self.momentum != 0.0
    }

    fn first_step_differs(&self) -> bool {
        // Without dampening, a buffer of zeros is equivalent to none.
        self.momentum != 0.0 && self.dampening != 0.0
    }

    fn set_weight_decay(&mut self, weight_decay: f64) {
        self.weight_decay = weight_decay;
    }

    fn momentum_mut(&mut self) -> Option<&mut f64> {
        Some(&mut self.momentum)
    }

    fn torch_options(&self, has_fused_kernels: bool) -> Fields {
        let own = [
            float("momentum", self.momentum),
            float("dampening", self.dampening),
            float("weight_decay", self.weight_decay),
            flag("nesterov", self.nesterov),
            flag("maximize", self.maximize),
        ];
        own.into_iter().chain(fused(has_fused_kernels)).collect()
    }

    fn is_in(group: TorchGroup<'_>) -> bool {
        group.has("momentum") && group.has("dampening")
    }
}

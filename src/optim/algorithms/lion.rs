//! Lion.

use serde::{Deserialize, Serialize};

use super::{Fields, Spec, StateTensor, TorchGroup, check_betas, flag, float, non_negative, pair};
use crate::error::Result;
use crate::ffi::{self, MomentFormat, OptimOptions};

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

impl Default for Lion {
    fn default() -> Self {
        Self { betas: (0.9, 0.99), weight_decay: 0.0, maximize: false }
    }
}

impl Spec for Lion {
    fn check(&self, _lr: f64) -> Result<()> {
        check_betas(self.betas)?;
        non_negative("weight_decay", self.weight_decay)
    }

    fn options(&self, lr: f64) -> OptimOptions {
        let Self { betas, weight_decay, maximize } = *self;
        let (algorithm, others) = (ffi::OPTIM_LION, OptimOptions::default());
        OptimOptions { algorithm, lr, betas, weight_decay, maximize, ..others }
    }

    fn tensors(&self, _kept_as: MomentFormat) -> &'static [StateTensor] {
        const { &[StateTensor::required("exp_avg")] }
    }

    fn counts_steps(&self) -> bool {
        false
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
            float("weight_decay", self.weight_decay),
            flag("maximize", self.maximize),
        ]
    }

    /// PyTorch has no Lion. That of its authors has no `eps`.
    fn is_in(group: TorchGroup<'_>) -> bool {
        group.has("betas") && !group.has("eps")
    }
}

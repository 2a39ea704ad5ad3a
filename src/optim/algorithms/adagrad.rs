//! Adagrad.

use serde::{Deserialize, Serialize};

use super::{Fields, Spec, StateTensor, TorchGroup, flag, float, fused, non_negative};
use crate::error::Result;
use crate::ffi::{self, MomentFormat, OptimOptions};

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

impl Spec for Adagrad {
    fn check(&self, _lr: f64) -> Result<()> {
        non_negative("lr_decay", self.lr_decay)?;
        non_negative("initial_accumulator_value", self.initial_accumulator_value)?;
        non_negative("eps", self.eps)?;
        non_negative("weight_decay", self.weight_decay)
    }

    fn options(&self, lr: f64) -> OptimOptions {
        let Self { lr_decay, weight_decay, initial_accumulator_value: _, eps, maximize } = *self;
        let (algorithm, others) = (ffi::OPTIM_ADAGRAD, OptimOptions::default());
        OptimOptions { algorithm, lr, lr_decay, weight_decay, eps, maximize, ..others }
    }

    fn tensors(&self, _kept_as: MomentFormat) -> &'static [StateTensor] {
        const { &[StateTensor::required("sum")] }
    }

    fn initial(&self, _place: usize) -> f64 {
        self.initial_accumulator_value
    }

    fn begins_with_state(&self) -> bool {
        true
    }

    fn set_weight_decay(&mut self, weight_decay: f64) {
        self.weight_decay = weight_decay;
    }

    fn torch_options(&self, has_fused_kernels: bool) -> Fields {
        let own = [
            float("lr_decay", self.lr_decay),
            float("eps", self.eps),
            float("weight_decay", self.weight_decay),
            float("initial_accumulator_value", self.initial_accumulator_value),
            flag("maximize", self.maximize),
        ];
        own.into_iter().chain(fused(has_fused_kernels)).collect()
    }

    fn is_fused_on_gpus(&self) -> bool {
        // In PyTorch up to 2.11.
        false
    }

    fn is_in(group: TorchGroup<'_>) -> bool {
        group.has("lr_decay")
    }
}

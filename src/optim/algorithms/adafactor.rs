//! Adafactor.

use serde::{Deserialize, Serialize};
use torch_files::Value;

use super::{Fields, KEPT, Spec, StateTensor, TorchGroup, flag, float, non_negative};
use crate::error::{Result, ensure};
use crate::ffi::{self, MomentFormat, OptimOptions, StateShape};

/// Adafactor, whose state is a number for each row and each column of a matrix instead of two for each element. The
/// counterpart of `torch.optim.Adafactor`.
///
/// The last two dimensions of a parameter are its matrices. Parameters with fewer dimensions, such as biases, keep a
/// number for each element. There is no momentum, and there are no low-bit moments: a matrix has nothing left to save.
/// During a step, each parameter takes 4 bytes per element for its direction (8 in f64), like those of PyTorch's
/// `foreach` version.
///
/// The learning rate is an upper bound: step t uses at most `1 / t.sqrt()`, times the root mean square of the weights.
/// No step synchronizes, where PyTorch waits twice for each parameter.
///
/// Source: Shazeer and Stern, *Adafactor: Adaptive Learning Rates with Sublinear Memory Cost*,
/// <https://arxiv.org/abs/1804.04235>.
///
/// # Examples
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use tch_amp::optim::Adafactor;
///
/// let w = Tensor::ones([512, 256], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let mut opt = Adafactor::default().build(&[w.shallow_clone()], 0.01)?;
/// opt.backward_step(&w.square().sum(Kind::Float))?;
/// let state = &opt.state_dict()?.state["0"];
/// assert_eq!((state["row_var"].size(), state["col_var"].size()), (vec![512, 1], vec![1, 256]));
/// // The weights are 1, and so is their root mean square.
/// assert!((w.double_value(&[0, 0]) - 0.99).abs() < 1e-6);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Adafactor {
    /// Decay rate of the running averages of squares, to which step t gives the weight `t.powf(beta2_decay)`; at most
    /// 0. Defaults to -0.8.
    pub beta2_decay: f64,
    /// The square root of the smallest square that a gradient is divided by, `None` for the epsilon of the dtype of the
    /// arithmetic, and the smallest root mean square of the weights that the learning rate is multiplied by. At least
    /// 0. Defaults to (`None`, 1e-3).
    pub eps: (Option<f64>, f64),
    /// Clipping threshold: a larger root mean square of an update is reduced to it. At least 1. Defaults to 1.
    pub d: f64,
    /// Decoupled weight decay: each step first multiplies a weight by 1 - lr * weight_decay. At least 0. Defaults to 0.
    pub weight_decay: f64,
    /// Maximize the objective instead of minimizing it. Defaults to `false`.
    pub maximize: bool,
}

impl Default for Adafactor {
    fn default() -> Self {
        Self { beta2_decay: -0.8, eps: (None, 1e-3), d: 1.0, weight_decay: 0.0, maximize: false }
    }
}

impl Spec for Adafactor {
    fn check(&self, _lr: f64) -> Result<()> {
        let Self { beta2_decay, eps, d, weight_decay, .. } = *self;
        let fits = beta2_decay <= 0.0 && beta2_decay.is_finite();
        ensure("beta2_decay", beta2_decay, fits, "finite and at most 0")?;
        non_negative("eps", eps.0.unwrap_or_default())?;
        non_negative("eps", eps.1)?;
        ensure("d", d, d >= 1.0 && d.is_finite(), "finite and at least 1")?;
        non_negative("weight_decay", weight_decay)
    }

    fn options(&self, lr: f64) -> OptimOptions {
        OptimOptions {
            algorithm: ffi::OPTIM_ADAFACTOR,
            lr,
            beta2_decay: self.beta2_decay,
            eps: self.eps.0.unwrap_or(f64::NAN),
            eps2: self.eps.1,
            clip_threshold: self.d,
            weight_decay: self.weight_decay,
            maximize: self.maximize,
            ..OptimOptions::default()
        }
    }

    fn tensors(&self, _kept_as: MomentFormat) -> &'static [StateTensor] {
        const {
            &[
                StateTensor::required("row_var").shaped(StateShape::OfRows),
                StateTensor::required("col_var").shaped(StateShape::OfColumns),
                StateTensor::required("variance"),
            ]
        }
    }

    fn used(&self, _kept_as: MomentFormat, dims: usize) -> [bool; KEPT] {
        let is_factored = dims >= 2;
        [is_factored, is_factored, !is_factored]
    }

    fn set_weight_decay(&mut self, weight_decay: f64) {
        self.weight_decay = weight_decay;
    }

    fn torch_options(&self, _has_fused_kernels: bool) -> Fields {
        let first = self.eps.0.map_or(Value::None, Value::Float);
        vec![
            float("beta2_decay", self.beta2_decay),
            ("eps".into(), Value::Tuple(vec![first, Value::Float(self.eps.1)])),
            float("d", self.d),
            float("weight_decay", self.weight_decay),
            ("foreach".into(), Value::None),
            flag("maximize", self.maximize),
        ]
    }

    fn is_in(group: TorchGroup<'_>) -> bool {
        group.has("beta2_decay")
    }
}

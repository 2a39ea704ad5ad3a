//! Muon, and the AdamW that it has for all parameters but matrices.

use serde::{Deserialize, Serialize};
use torch_files::Value;

use super::{
    AdamW, Algorithm, Fields, LowBit, Spec, StateTensor, TorchGroup, flag, float, non_negative,
};
use crate::error::{Result, ensure};
use crate::ffi::{self, MomentFormat, OptimOptions};

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

impl Spec for Muon {
    fn check(&self, lr: f64) -> Result<()> {
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
        self.adamw.check(lr)
    }

    /// The options of a step of matrices.
    fn options(&self, lr: f64) -> OptimOptions {
        OptimOptions {
            algorithm: ffi::OPTIM_MUON,
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

    fn other_options(&self, lr: f64) -> OptimOptions {
        self.adamw.options(lr * self.adamw_lr_factor)
    }

    fn tensors(&self, _kept_as: MomentFormat) -> &'static [StateTensor] {
        const { &[StateTensor::required("momentum_buffer")] }
    }

    fn counts_steps(&self) -> bool {
        false
    }

    fn set_weight_decay(&mut self, weight_decay: f64) {
        (self.weight_decay, self.adamw.weight_decay) = (weight_decay, weight_decay);
    }

    fn momentum_mut(&mut self) -> Option<&mut f64> {
        Some(&mut self.momentum)
    }

    fn low_bit(&self, kept_as: MomentFormat) -> LowBit {
        match kept_as {
            MomentFormat::EightBit => LowBit::Refused(
                "must be `MomentDtype::BFloat16` or `MomentDtype::F32` for Muon: an 8-bit first moment is stored \
                 relative to a second one, which Muon does not have",
            ),
            kept_as => self.adamw.low_bit(kept_as),
        }
    }

    /// The options of PyTorch's Muon, and those that only this crate has. PyTorch keeps them.
    fn torch_options(&self, _has_fused_kernels: bool) -> Fields {
        let (a, b, c) = self.ns_coefficients;
        let adjust = match self.adjust_lr_fn {
            AdjustLr::Original => "original",
            AdjustLr::MatchRmsAdamW => "match_rms_adamw",
        };
        vec![
            float("weight_decay", self.weight_decay),
            float("momentum", self.momentum),
            flag("nesterov", self.nesterov),
            ("ns_coefficients".into(), Value::Tuple([a, b, c].map(Value::Float).to_vec())),
            float("eps", self.eps),
            ("ns_steps".into(), Value::Int(self.ns_steps.into())),
            ("adjust_lr_fn".into(), adjust.into()),
            flag("use_muon", self.use_muon),
            float("adamw_lr_factor", self.adamw_lr_factor),
        ]
    }

    fn is_in(group: TorchGroup<'_>) -> bool {
        group.has("ns_steps")
    }
}

impl Algorithm {
    /// Returns whether AdamW steps a parameter in place of Muon.
    pub(crate) fn leaves_to_adamw(&self, dims: usize) -> bool {
        matches!(self, Self::Muon(muon) if !(muon.use_muon && dims == 2))
    }

    /// The algorithm that steps a parameter of so many dimensions: AdamW where Muon leaves it to that.
    pub(crate) fn of(&self, dims: usize) -> Self {
        match *self {
            Self::Muon(Muon { adamw, .. }) if self.leaves_to_adamw(dims) => adamw.into(),
            algorithm => algorithm,
        }
    }
}

//! Fused optimizers, which step all parameters in one call without synchronizing, and the trait through which a scaler
//! steps an optimizer.
//!
//! ```
//! use tch::{Device, Kind, Tensor, nn};
//! use tch_amp::{GradScaler, optim};
//!
//! let vs = nn::VarStore::new(Device::Cpu);
//! let net = nn::linear(vs.root(), 4, 1, Default::default());
//! let mut opt = optim::AdamW::default().build(&vs, 1e-3)?;
//! let mut scaler = GradScaler::new(Device::Cpu)?;
//! for _ in 0..3 {
//!     let loss = Tensor::randn([8, 4], (Kind::Float, Device::Cpu)).apply(&net).square().mean(Kind::Float);
//!     opt.zero_grad()?;
//!     scaler.backward(&loss)?;
//!     let _outcome = scaler.step_clip_norm(&mut opt, 1.0)?;
//!     scaler.update()?;
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod algorithm;
mod config;
mod first_step;
mod groups;
mod master_weights;
mod masters;
mod muon;
mod optimizer;
pub(crate) mod parameters;
mod saved;
#[cfg_attr(
    not(feature = "distributed"),
    expect(dead_code, reason = "there are no ranks without the feature")
)]
mod sharded;
#[cfg_attr(
    not(feature = "distributed"),
    expect(dead_code, reason = "there are no ranks without the feature")
)]
mod shards;
mod state;
mod state_dict;
mod step;
mod update;

use std::panic::{AssertUnwindSafe, catch_unwind};

pub use algorithm::{Algorithm, ParamGroup};
pub use config::{Adagrad, Adam, AdamW, Lion, RmsProp, Sgd};
pub use master_weights::MasterWeights;
pub use muon::{AdjustLr, Muon};
pub use optimizer::{Optimizer, OptimizerBuilder};
pub use parameters::IntoParameters;
pub(crate) use saved::Saved;
pub use saved::{OptimizerState, ParamGroupState};
#[cfg(feature = "distributed")]
pub(crate) use shards::Ranks;
pub(crate) use state_dict::CheckedState;
pub use step::Step;

use crate::autocast::forgetting_casts;
pub use crate::error::OptimizerError;
use crate::error::{Error, Result};
pub use crate::gradients::parameters::Parameters;
use crate::panics;

/// An optimizer that a [`GradScaler`](crate::GradScaler) can step. The counterpart of `torch.optim.Optimizer`, reduced
/// to what a scaler needs.
///
/// It is implemented for the fused [`Optimizer`] and for [`tch::nn::Optimizer`]. Implementing it for another optimizer
/// takes a few lines:
///
/// ```
/// use tch::Tensor;
/// use tch_amp::optim::{AmpOptimizer, Parameters, Step};
///
/// struct SignSgd { weights: Vec<Tensor>, lr: f64 }
///
/// impl AmpOptimizer for SignSgd {
///     fn parameters(&self) -> Parameters<'_> { self.weights.as_slice().into() }
///     fn update(&mut self, _step: &Step<'_>) -> tch_amp::Result<()> {
///         tch::no_grad(|| for w in &mut self.weights { let g = w.grad(); *w -= g.sign() * self.lr; });
///         Ok(())
///     }
/// }
/// ```
pub trait AmpOptimizer {
    /// Returns every tensor that [`update`](Self::update) may change, always in the same order. The scaler recognizes
    /// an optimizer by these tensors, so the optimizer itself may be moved.
    fn parameters(&self) -> Parameters<'_>;

    /// Updates the parameters from their gradients.
    ///
    /// The scaler calls it only for a step that is taken, with finite and unscaled gradients, and clears the autocast
    /// weight cache afterwards. (A disabled scaler calls it for every step, with the gradients as they are.)
    ///
    /// An optimizer that [takes scaled gradients](Self::takes_scaled_gradients) is called for every step that the host
    /// does not know to be skipped. Of the fields of `step` that are set, it divides the gradients by
    /// [`grad_scale`](Step::grad_scale), multiplies them by [`clip_factor`](Step::clip_factor), and changes nothing at
    /// all if [`found_inf`](Step::found_inf) is not zero.
    ///
    /// # Errors
    ///
    /// Any error, for instance an [`OptimizerError::Step`]; the scaler returns it to its caller.
    fn update(&mut self, step: &Step<'_>) -> Result<()>;

    /// Returns whether [`update`](Self::update) unscales, clips and skips by itself, on the device. The host then does
    /// not synchronize to find out whether a gradient is non-finite. Corresponds to `_step_supports_amp_scaling` of an
    /// optimizer in PyTorch. Defaults to `false`.
    fn takes_scaled_gradients(&self) -> bool {
        false
    }

    /// Returns whether the gradients of bf16 and fp16 parameters become f32 before they are unscaled in place, so that
    /// unscaling loses no precision. Meant for optimizers that update such parameters in f32. Defaults to `false`.
    fn wants_f32_gradients(&self) -> bool {
        false
    }

    /// Returns the name of the parameter at `index` for messages, if it has one. The implementation must not use the
    /// scaler, which is borrowed during the call. Defaults to `None`.
    fn parameter_name(&self, _index: usize) -> Option<String> {
        None
    }
}

/// Takes the step of an optimizer, and forgets the casts of its weights.
pub(crate) fn take_step(optimizer: &mut dyn AmpOptimizer, step: &Step<'_>) -> Result<()> {
    forgetting_casts(|| optimizer.update(step))
}

impl AmpOptimizer for tch::nn::Optimizer {
    /// Returns the trainable variables of the `VarStore`, including those that were added after the optimizer was
    /// built: its step takes them up, too.
    fn parameters(&self) -> Parameters<'_> {
        self.trainable_variables().into()
    }

    fn update(&mut self, _step: &Step<'_>) -> Result<()> {
        // tch's own `step` has no fallible counterpart and panics with libtorch's message.
        catch_unwind(AssertUnwindSafe(|| self.step())).map_err(|panic| {
            Error::Optimizer(OptimizerError::Step(panics::into_message(panic).into()))
        })
    }
}

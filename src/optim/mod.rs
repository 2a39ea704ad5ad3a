//! Optimizers that step all parameters in one call and never wait for the device, clipping, and the trait that a scaler
//! steps through.
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

mod clip;
mod config;
mod first_step;
mod groups;
mod masters;
mod optimizer;
mod parameters;
mod state;
mod state_dict;
mod step;
mod update;

use std::panic::{AssertUnwindSafe, catch_unwind};

pub use config::{Adagrad, Adam, AdamW, Algorithm, OptimizerBuilder, Sgd};
pub use groups::ParamGroup;
pub use masters::MasterWeights;
pub use optimizer::Optimizer;
pub use parameters::IntoParameters;
pub(crate) use state_dict::{Loaded, Saved};
pub use state_dict::{OptimizerState, ParamGroupState};
pub use step::Step;

pub use crate::error::OptimizerError;
use crate::error::{Error, Result};
pub use crate::gradients::parameters::Parameters;
use crate::panics;

/// An optimizer that a [`GradScaler`](crate::GradScaler) can step: it names its parameters and updates them. In PyTorch
/// that is a `torch.optim.Optimizer`.
///
/// It is implemented for the fused [`Optimizer`] and for [`tch::nn::Optimizer`]. An optimizer of your own takes a few
/// lines:
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
    /// Returns every tensor that [`update`](Self::update) may change, always in the same order. The scaler recognizes an
    /// optimizer by them, so it may be moved freely.
    fn parameters(&self) -> Parameters<'_>;

    /// Changes the parameters by their gradients.
    ///
    /// The scaler calls it only for a step that is taken, with finite and unscaled gradients, and clears the autocast
    /// weight cache afterwards. An optimizer that [takes scaled gradients](Self::takes_scaled_gradients) is called for
    /// every step instead: it divides the gradients by [`grad_scale`](Step::grad_scale), multiplies them by
    /// [`clip_factor`](Step::clip_factor), and changes nothing at all if [`found_inf`](Step::found_inf) is not zero.
    ///
    /// # Errors
    ///
    /// Whatever went wrong, for instance as [`OptimizerError::Step`]; the scaler passes it on.
    fn update(&mut self, step: &Step<'_>) -> Result<()>;

    /// Returns whether [`update`](Self::update) unscales, clips and skips by itself, on the device. The host then does
    /// not wait to learn whether a gradient is infinite. It is `_step_supports_amp_scaling` of an optimizer in PyTorch.
    /// Defaults to `false`.
    fn takes_scaled_gradients(&self) -> bool {
        false
    }

    /// Returns whether the gradients of bf16 and fp16 parameters become f32 before they are unscaled in place, so that
    /// unscaling loses nothing: for an optimizer that updates such parameters in f32. Defaults to `false`.
    fn wants_f32_gradients(&self) -> bool {
        false
    }

    /// Returns the name of the parameter at `index`, for messages, if the optimizer knows it. It must not use the
    /// scaler, which is at work. Defaults to `None`.
    fn parameter_name(&self, _index: usize) -> Option<String> {
        None
    }
}

impl AmpOptimizer for tch::nn::Optimizer {
    /// Returns the trainable variables of the VarStore, those that were added after the optimizer was built included:
    /// its step takes them up, too.
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

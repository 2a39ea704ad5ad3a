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

#![forbid(unsafe_code)]

mod clip;
mod config;
mod dict;
mod fields;
mod groups;
mod load;
mod masters;
mod optimizer;
mod parameters;
mod scaled;
mod stamps;
mod state;
mod taken;
mod update;

use std::panic::{AssertUnwindSafe, catch_unwind};

pub(crate) use clip::{check_limit, explained};
pub use clip::{clip_grad_norm, clip_grad_norm_error_if_nonfinite, clip_grad_value};
pub use config::{Adagrad, Adam, AdamW, Algorithm, Sgd};
pub use dict::{OptimizerState, ParamGroupState};
pub use groups::ParamGroup;
pub(crate) use load::{Loaded, Saved};
pub use masters::MasterWeights;
pub use optimizer::Optimizer;
pub use parameters::{IntoParameters, Parameters};
pub use scaled::{AmpScaling, ScaledStep};
pub use taken::TakenSteps;

use crate::error::{Error, Result};
use crate::panics;

/// An optimizer that a [`GradScaler`](crate::GradScaler) can step: it names its parameters and takes a step. In
/// PyTorch, `torch.optim.Optimizer` is that.
///
/// Implemented for the fused [`Optimizer`] and for [`tch::nn::Optimizer`]. Your own takes a few lines:
///
/// ```
/// use tch::Tensor;
/// use tch_amp::{AmpOptimizer, Parameters, Result};
///
/// struct SignSgd { weights: Vec<Tensor>, lr: f64 }
///
/// impl AmpOptimizer for SignSgd {
///     fn parameters(&self) -> Parameters<'_> { self.weights.as_slice().into() }
///     fn step(&mut self) -> Result<()> {
///         tch::no_grad(|| for w in &mut self.weights { let g = w.grad(); *w -= g.sign() * self.lr; });
///         Ok(())
///     }
/// }
/// ```
pub trait AmpOptimizer {
    /// Returns every tensor that [`step`](Self::step) may change, always in the same order. The scaler recognises an
    /// optimizer by them, so it may be moved freely.
    fn parameters(&self) -> Parameters<'_>;

    /// Changes the parameters by their gradients, which are finite and unscaled. The scaler calls it only for a step
    /// that is taken.
    ///
    /// # Errors
    ///
    /// Whatever went wrong, for instance as [`Error::Optimizer`]; the scaler hands it on.
    fn step(&mut self) -> Result<()>;

    /// Returns the name of the parameter at `index`, for messages, where the optimizer knows it. It must not use the
    /// scaler, which is at work.
    fn parameter_name(&self, _index: usize) -> Option<String> {
        None
    }

    /// Called before the gradients are unscaled in place: an optimizer that updates half parameters in f32 makes their
    /// gradients f32 here, so that unscaling loses nothing. It may be called again when they have been unscaled, and must
    /// leave them as they are then.
    ///
    /// # Errors
    ///
    /// Whatever went wrong; the scaler hands it on.
    fn prepare_unscale(&mut self) -> Result<()> {
        Ok(())
    }

    /// Returns the optimizer as one that unscales and skips on the device, where it can. The scaler then leaves
    /// [`step`](Self::step) alone and does not wait for the device.
    fn amp_scaling(&mut self) -> Option<&mut dyn AmpScaling> {
        None
    }
}

impl AmpOptimizer for tch::nn::Optimizer {
    /// Returns the trainable variables of the VarStore, those that were added after the optimizer was built included:
    /// its step takes them up, too.
    fn parameters(&self) -> Parameters<'_> {
        self.trainable_variables().into()
    }

    fn step(&mut self) -> Result<()> {
        // tch's own `step` has no fallible twin and panics with libtorch's message.
        catch_unwind(AssertUnwindSafe(|| tch::nn::Optimizer::step(self)))
            .map_err(|panic| Error::Optimizer(panics::into_message(panic).into()))
    }
}

//! Clipping the gradients of an optimizer.

use tch::Tensor;

use crate::error::Result;
use crate::gradients::{clip_grad_norm, clip_grad_norm_error_if_nonfinite, clip_grad_value};
use crate::optim::{AmpOptimizer, Optimizer};

impl Optimizer {
    /// Clips the gradients of all parameters to a common 2-norm, like
    /// [`clip_grad_norm`](crate::gradients::clip_grad_norm). With a scaler, unscale them first, or use
    /// [`GradScaler::step_clip_norm`](crate::GradScaler::step_clip_norm).
    ///
    /// # Errors
    ///
    /// The same as [`clip_grad_norm`](crate::gradients::clip_grad_norm).
    pub fn clip_grad_norm(&self, max_norm: f64) -> Result<Tensor> {
        clip_grad_norm(&self.parameters(), max_norm)
    }

    /// Clips the gradients of all parameters to a common 2-norm, but fails if the norm is infinite or NaN, like
    /// [`clip_grad_norm_error_if_nonfinite`](crate::gradients::clip_grad_norm_error_if_nonfinite). Synchronizes.
    ///
    /// # Errors
    ///
    /// The same as [`clip_grad_norm_error_if_nonfinite`](crate::gradients::clip_grad_norm_error_if_nonfinite).
    pub fn clip_grad_norm_error_if_nonfinite(&self, max_norm: f64) -> Result<Tensor> {
        clip_grad_norm_error_if_nonfinite(&self.parameters(), max_norm)
    }

    /// Clamps every element of the gradients of all parameters, like
    /// [`clip_grad_value`](crate::gradients::clip_grad_value).
    ///
    /// # Errors
    ///
    /// The same as [`clip_grad_value`](crate::gradients::clip_grad_value).
    pub fn clip_grad_value(&self, max: f64) -> Result<()> {
        clip_grad_value(&self.parameters(), max)
    }
}

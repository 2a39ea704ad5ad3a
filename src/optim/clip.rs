//! Clipping the gradients of an optimizer.

use tch::Tensor;

use crate::error::Result;
use crate::gradients::{clip_grad_norm, clip_grad_norm_error_if_nonfinite, clip_grad_value};
use crate::optim::{AmpOptimizer, Optimizer};

impl Optimizer {
    /// Clips the gradients of all parameters, as [`clip_grad_norm`](crate::gradients::clip_grad_norm). With a scaler,
    /// unscale them first, or use [`GradScaler::step_clip_norm`](crate::GradScaler::step_clip_norm).
    ///
    /// # Errors
    ///
    /// As [`clip_grad_norm`](crate::gradients::clip_grad_norm).
    pub fn clip_grad_norm(&self, max_norm: f64) -> Result<Tensor> {
        clip_grad_norm(&self.parameters(), max_norm)
    }

    /// Clips as [`clip_grad_norm_error_if_nonfinite`](crate::gradients::clip_grad_norm_error_if_nonfinite). Waits for the
    /// device.
    ///
    /// # Errors
    ///
    /// As [`clip_grad_norm_error_if_nonfinite`](crate::gradients::clip_grad_norm_error_if_nonfinite).
    pub fn clip_grad_norm_error_if_nonfinite(&self, max_norm: f64) -> Result<Tensor> {
        clip_grad_norm_error_if_nonfinite(&self.parameters(), max_norm)
    }

    /// Clamps the gradients of all parameters, as [`clip_grad_value`](crate::gradients::clip_grad_value).
    ///
    /// # Errors
    ///
    /// As [`clip_grad_value`](crate::gradients::clip_grad_value).
    pub fn clip_grad_value(&self, max: f64) -> Result<()> {
        clip_grad_value(&self.parameters(), max)
    }
}

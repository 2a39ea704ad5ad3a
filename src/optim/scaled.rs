//! Optimizers that unscale and skip on the device.

#![forbid(unsafe_code)]

use tch::Tensor;

use crate::error::Result;

/// A step whose gradients are still scaled, and which may have to be skipped. What PyTorch sets on an optimizer as
/// `grad_scale` and `found_inf`.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct ScaledStep<'a> {
    /// What the gradients are to be divided by: f32, one element. `None` when they have been unscaled.
    pub grad_scale: Option<&'a Tensor>,
    /// What the unscaled gradients are to be multiplied by, at most 1: one element. `None` without clipping.
    pub clip: Option<&'a Tensor>,
    /// Whether the step must be skipped: f32, one element, 1 when a gradient is infinite or NaN and 0 otherwise. `None`
    /// when the host knows that all are finite.
    pub found_inf: Option<&'a Tensor>,
}

/// An optimizer that can take a [`ScaledStep`] without the host knowing what it does. In PyTorch an optimizer with
/// `_step_supports_amp_scaling`.
pub trait AmpScaling {
    /// Steps by the unscaled gradients, or changes nothing at all where `found_inf` is not zero. It should not wait for
    /// the device.
    ///
    /// # Errors
    ///
    /// As [`AmpOptimizer::step`](crate::AmpOptimizer::step). Nothing may have been changed.
    fn step_scaled(&mut self, step: &ScaledStep<'_>) -> Result<()>;
}

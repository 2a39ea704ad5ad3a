//! What a scaler asks of an optimizer.

use tch::Tensor;

use crate::ffi::OptimScale;

/// One step: what the gradients still need before they are applied, and whether they may be applied at all.
///
/// The default is an ordinary step, by the gradients as they are. Only an optimizer that
/// [takes scaled gradients](crate::optim::AmpOptimizer::takes_scaled_gradients) is given any other. PyTorch sets the same
/// things on an optimizer, as its attributes `grad_scale` and `found_inf`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Step<'a>(OptimScale<'a>);

impl<'a> Step<'a> {
    /// Sets what the gradients have to be divided by: an f32 tensor of one element.
    #[must_use]
    pub fn with_grad_scale(self, grad_scale: &'a Tensor) -> Self {
        Self(OptimScale { grad_scale: Some(grad_scale), ..self.0 })
    }

    /// Sets what the unscaled gradients have to be multiplied by: a tensor of one element that is at most 1.
    #[must_use]
    pub fn with_clip_factor(self, clip: &'a Tensor) -> Self {
        Self(OptimScale { clip: Some(clip), ..self.0 })
    }

    /// Sets whether the step has to be skipped: an f32 tensor of one element, 1 to skip it and 0 to take it.
    #[must_use]
    pub fn with_found_inf(self, found_inf: &'a Tensor) -> Self {
        Self(OptimScale { found_inf: Some(found_inf), ..self.0 })
    }

    /// Returns what the gradients have to be divided by, an f32 tensor of one element, or `None` if they are unscaled.
    pub fn grad_scale(&self) -> Option<&'a Tensor> {
        self.0.grad_scale
    }

    /// Returns what the unscaled gradients have to be multiplied by, a tensor of one element that is at most 1, or `None`
    /// without clipping.
    pub fn clip_factor(&self) -> Option<&'a Tensor> {
        self.0.clip
    }

    /// Returns whether the step has to be skipped: an f32 tensor of one element that is 1 if a gradient is infinite or
    /// NaN, and else 0. `None` if the host knows that all gradients are finite.
    pub fn found_inf(&self) -> Option<&'a Tensor> {
        self.0.found_inf
    }

    pub(crate) fn scale(&self) -> OptimScale<'a> {
        self.0
    }
}

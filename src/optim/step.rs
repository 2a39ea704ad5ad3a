//! The arguments of an optimizer's step.

use tch::Tensor;

use crate::ffi::OptimScale;

/// How a step has to treat the gradients: the scale to divide them by, the factor to clip them with, and whether the
/// step is skipped.
///
/// The default is an ordinary step with the gradients as they are. Only an optimizer that
/// [takes scaled gradients](crate::optim::AmpOptimizer::takes_scaled_gradients) is given anything else. In PyTorch the
/// scaler sets the attributes `grad_scale` and `found_inf` of the optimizer instead.
///
/// # Examples
///
/// ```
/// use tch::Tensor;
/// use tch_amp::optim::{AmpOptimizer, Sgd, Step};
///
/// let w = Tensor::from_slice(&[1f32]).set_requires_grad(true);
/// let mut opt = Sgd::default().build(&[w.shallow_clone()], 0.25)?;
/// let (scale, found_inf) = (Tensor::from(1024f32), Tensor::from(1f32));
/// (&w * &scale).sum(None).backward();
/// let step = Step::default().with_grad_scale(&scale);
/// opt.update(&step.with_found_inf(&found_inf))?;
/// assert_eq!(w.double_value(&[0]), 1.0);
/// opt.update(&step)?;
/// assert_eq!(w.double_value(&[0]), 0.75);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Step<'a>(OptimScale<'a>);

impl<'a> Step<'a> {
    /// Sets the scale by which the gradients have to be divided: an f32 tensor with one element.
    #[must_use]
    pub fn with_grad_scale(self, grad_scale: &'a Tensor) -> Self {
        Self(OptimScale { grad_scale: Some(grad_scale), ..self.0 })
    }

    /// Sets the factor by which the unscaled gradients have to be multiplied: a tensor with one element that is at most
    /// 1.
    #[must_use]
    pub fn with_clip_factor(self, clip: &'a Tensor) -> Self {
        Self(OptimScale { clip: Some(clip), ..self.0 })
    }

    /// Sets the flag that tells whether the step has to be skipped: an f32 tensor with one element, 1 to skip the step
    /// and 0 to take it.
    #[must_use]
    pub fn with_found_inf(self, found_inf: &'a Tensor) -> Self {
        Self(OptimScale { found_inf: Some(found_inf), ..self.0 })
    }

    /// Returns the scale by which the gradients have to be divided, an f32 tensor with one element, or `None` if they
    /// are unscaled.
    pub fn grad_scale(&self) -> Option<&'a Tensor> {
        self.0.grad_scale
    }

    /// Returns the factor by which the unscaled gradients have to be multiplied, a tensor with one element that is at
    /// most 1, or `None` without clipping.
    pub fn clip_factor(&self) -> Option<&'a Tensor> {
        self.0.clip
    }

    /// Returns the flag that tells whether the step has to be skipped: an f32 tensor with one element that is 1 if a
    /// gradient is infinite or NaN, and otherwise 0. `None` if the host knows that all gradients are finite.
    pub fn found_inf(&self) -> Option<&'a Tensor> {
        self.0.found_inf
    }

    pub(crate) fn scale(&self) -> OptimScale<'a> {
        self.0
    }
}

//! Errors about gradients.

use crate::error::text::Number;

/// Why gradients were not unscaled, clipped or passed to an optimizer. Unless a variant says otherwise, no gradient was
/// changed.
///
/// # Examples
///
/// ```
/// use tch::Tensor;
/// use tch_amp::Error;
/// use tch_amp::gradients::{ClipNorm, GradientError, clip_grad_norm};
///
/// let w = Tensor::from_slice(&[1f32]).set_requires_grad(true);
/// (&w * f64::INFINITY).sum(None).backward();
/// let clip = ClipNorm { error_if_nonfinite: true, ..ClipNorm::from(1.0) };
/// let clipped = clip_grad_norm(&[w], clip);
/// assert!(matches!(clipped, Err(Error::Gradient(GradientError::NonFiniteNorm { norm: f64::INFINITY }))));
/// ```
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum GradientError {
    /// A gradient cannot be unscaled, clipped or used by the optimizer. No gradient was changed.
    #[error("the gradient of {parameter} {problem}")]
    Unsupported {
        /// The parameter: its name if it is known, or else its index, and its shape.
        parameter: String,
        /// What is wrong with its gradient, and what to do.
        problem: &'static str,
    },

    /// A gradient is not the one that was unscaled. The optimizer was not stepped.
    #[error(
        "the gradient of {parameter} {how} between unscale_ and step; run every backward first, and clip before another loss is scaled"
    )]
    Changed {
        /// The parameter: its name if it is known, or else its index, and its shape.
        parameter: String,
        /// What happened to it.
        how: &'static str,
    },

    /// The gradient of a parameter has already been unscaled with another list of parameters and would be unscaled
    /// twice. Several optimizers may have a parameter if each steps before its gradient is zeroed for the next.
    #[error(
        "{parameter} has already been unscaled with another list of parameters: step that optimizer and zero the gradients before the next loss is scaled, and add variables before unscale_"
    )]
    Shared {
        /// The parameter: its name if it is known, or else its index, and its shape.
        parameter: String,
    },

    /// The gradients have been accumulated on this rank alone, and are not averaged over the ranks of a group yet.
    /// Until they are averaged or dropped, their optimizer cannot step, and the scale by which they were multiplied
    /// cannot change. Models that accumulate over different numbers of batches need a scaler each.
    #[error(
        "the gradients of this rank have not been averaged over the ranks: run a backward outside of no_sync first, or drop them with zero_grad; if another model steps more often, give it a scaler of its own"
    )]
    Unsynced,

    /// The norm of the gradients is infinite or NaN. They were not clipped.
    #[error("the norm of the gradients is {}: look for an infinite or NaN loss", Number(*norm))]
    NonFiniteNorm {
        /// The norm.
        norm: f64,
    },
}

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
        /// The problem of its gradient.
        problem: GradientProblem,
    },

    /// A gradient is not the one that was unscaled. The optimizer was not stepped.
    #[error(
        "the gradient of {parameter} {how} between unscale_ and step; run every backward first, and clip before another loss is scaled"
    )]
    Changed {
        /// The parameter: its name if it is known, or else its index, and its shape.
        parameter: String,
        /// The change.
        how: GradientChange,
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

    /// A gradient is a sum of gradients that were multiplied by different scales, so that no number unscales it: no
    /// step has used it, the scale has changed since it was made or `unscale_` has divided it, and the backward of a
    /// later loss has added to it. All gradients of its optimizer are finite, so that the step would have been taken.
    /// No gradient was changed.
    #[error(
        "the gradient of {parameter} is a sum of gradients of different scales: a backward has added to one that unscale_ had divided, or that is from before an update() which has changed the scale; zero the gradients of this optimizer now; from here on, step it before update() and, once it is unscaled, before the next loss is scaled, or zero its gradients instead"
    )]
    MixedScales {
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

/// The problem with a gradient, in a [`GradientError::Unsupported`]. Its text says what to do where something helps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GradientProblem {
    /// The parameter is an undefined tensor, which can have no gradient.
    #[error("cannot exist: the parameter is an undefined tensor")]
    UndefinedParameter,

    /// The gradient is fp16, and a scaler unscales those only if it is told to.
    #[error(
        "is fp16, in which small values are lost: keep parameters in f32 and let autocast do the casts, give a fused optimizer master_weights, or set allow_fp16_gradients"
    )]
    Fp16,

    /// The gradient has a dtype with which nothing is computed, such as an 8-bit one.
    #[error(
        "is neither fp16, bf16, f32, f64 nor complex, and can be neither unscaled, normed, clipped nor counted; convert it first"
    )]
    Dtype,

    /// The gradient is complex, and complex numbers have no order by which they could be clamped.
    #[error(
        "is complex, and cannot be clamped, because complex numbers have no order; clip the norm"
    )]
    Complex,

    /// The gradient is sparse.
    #[error(
        "is sparse, and sparse gradients can be neither normed nor clipped nor used by a fused optimizer; make it dense with `to_dense` first, or give the parameter to an optimizer that takes it"
    )]
    Sparse,

    /// The gradient has a layout that the call does not take, such as a compressed sparse one, or has no data.
    #[error(
        "is neither strided nor COO sparse, or holds no data; make it dense with `to_dense` first"
    )]
    Layout,

    /// The gradient has another shape or is on another device than its parameter.
    #[error(
        "does not have the shape and device of its parameter; drop it with `zero_grad` and run backward again"
    )]
    OtherShape,

    /// The gradient has another dtype than its parameter.
    #[error(
        "has another dtype than its parameter; drop it with the optimizer's `zero_grad` and run backward again"
    )]
    OtherDtype,
}

/// The change to a gradient after it was unscaled, in a [`GradientError::Changed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GradientChange {
    /// There was none when the gradients were unscaled.
    #[error("appeared")]
    Appeared,

    /// It is another tensor now.
    #[error("was replaced")]
    Replaced,

    /// Its values changed after another loss was scaled, so that some of them may be scaled.
    #[error("changed after another loss was scaled")]
    AfterAnotherLoss,
}

//! Errors of gradient scalers and loss scales.

use tch::Kind;

use crate::error::text::Number;

/// Why a gradient scaler or a loss scale refused a call. Unless a variant says otherwise, nothing was changed.
///
/// # Examples
///
/// ```
/// use tch::{Device, Tensor};
/// use tch_amp::Error;
/// use tch_amp::optim::Sgd;
/// use tch_amp::scaler::{GradScalerConfig, ScalerError};
///
/// # let w = Tensor::from_slice(&[1f32]).set_requires_grad(true);
/// # let mut opt = Sgd::default().build(&[w.shallow_clone()], 0.1)?;
/// let mut scaler = GradScalerConfig { max_consecutive_skips: Some(2), ..Default::default() }.build(Device::Cpu)?;
/// let mut train = || {
///     opt.zero_grad()?;
///     scaler.backward(&(&w * f64::NAN).sum(None))?;
///     scaler.step(&mut opt)?;
///     scaler.update()
/// };
/// train()?;
/// let diverged = train();
/// assert!(matches!(diverged, Err(Error::Scaler(ScalerError::TooManySkips { skips: 2, scale: 16384.0, .. }))));
/// # Ok::<(), Error>(())
/// ```
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum ScalerError {
    /// A tensor with an integer, boolean or complex dtype was given to be scaled.
    #[error(
        "a tensor of dtype {dtype:?} cannot be scaled: scale the loss itself, a floating-point tensor through which gradients flow, not a count, an index or a comparison"
    )]
    Dtype {
        /// The dtype of the tensor.
        dtype: Kind,
    },

    /// `unscale_` was called twice for an optimizer in one iteration.
    #[error(
        "unscale_ has already been called on these parameters; call it once between two update()s"
    )]
    AlreadyUnscaled,

    /// `unscale_` was called after `step` in one iteration, with gradients that the step has used.
    #[error(
        "unscale_ is being called after step on these parameters, and their gradients are not new: call update() at the end of every iteration, or zero them before the next loss is scaled"
    )]
    UnscaleAfterStep,

    /// `step`, `abandon` or a backward of several losses was called with gradients that a step in this iteration, which
    /// was taken or skipped, has already used.
    #[error(
        "step has already been called on these parameters, and their gradients are not new: call update() at the end of every iteration, or zero them before the next loss is scaled"
    )]
    AlreadyStepped,

    /// libtorch failed while the gradients of an optimizer were being unscaled, so that some are unscaled and some are
    /// not. Running out of memory does not cause this: all that unscaling needs is allocated before the first gradient
    /// changes.
    #[error(
        "libtorch failed while these gradients were being unscaled: zero them, then call abandon or update"
    )]
    UnscaleFailed,

    /// `update` was called, but no gradient was checked since the last call.
    #[error(
        "no inf checks were recorded before update(): call it only after step or unscale_ with an optimizer whose parameters have gradients and are not frozen, so while gradients accumulate only in the iteration that steps"
    )]
    NoInfChecks,

    /// The call is only possible between iterations.
    #[error("{call} is only possible between iterations: call update() first")]
    IterationOpen {
        /// The name of the method.
        call: &'static str,
    },

    /// The call would end the iteration of an optimizer that was unscaled and not stepped, so that its next step would
    /// divide its gradients a second time.
    #[error(
        "{call} would end the iteration while an optimizer has been unscaled and not stepped: call step with that optimizer first, or abandon to leave its step out"
    )]
    StepDue {
        /// The name of the method.
        call: &'static str,
    },

    /// Too many consecutive iterations overflowed. The iteration was ended as usual: the scale has backed off.
    #[error(
        "{skips} iterations in a row overflowed (the limit is {limit}) and the scale is down to {}: look for a diverging loss or an infinite input; insight::Tracer names the operator that made the first infinity or NaN",
        Number(*scale)
    )]
    TooManySkips {
        /// The number of consecutive iterations that overflowed.
        skips: u32,
        /// The value of `max_consecutive_skips`.
        limit: u32,
        /// The scale after the last of them.
        scale: f64,
    },

    /// An iteration overflowed while the scale was at `min_scale`, and `error_at_min_scale` is set. The iteration was
    /// ended as usual.
    #[error(
        "an iteration overflowed at the smallest scale, {}, which cannot back off: look for a diverging loss or an infinite input, or lower min_scale; insight::Tracer names the operator that made the first infinity or NaN",
        Number(*scale)
    )]
    ScaleAtMinimum {
        /// The scale.
        scale: f64,
    },

    /// There is no loss with this number.
    #[error("there is no loss {loss_id}: these scalers were made for {losses}, counted from 0")]
    NoSuchLoss {
        /// The requested loss.
        loss_id: usize,
        /// The number of losses.
        losses: usize,
    },

    /// The state is empty, like that of a disabled scaler, which an enabled one cannot load.
    #[error(
        "the scaler state is empty, as a disabled GradScaler saves it: to scale from here on, load nothing and keep the new scaler; to go on without scaling, use GradScaler::disabled(), which loads it"
    )]
    EmptyState,

    /// The state is that of a scaler that only skips steps, and this one scales, or the other way round: the precision
    /// of the run has changed.
    #[error(
        "the scaler state is that of a scaler that {}, which this one does not: make the scaler after the precision is restored, or, when a run changes its precision, leave the scaler out of what is restored",
        if *scales { "scales" } else { "skips steps without scaling" }
    )]
    OtherPrecision {
        /// Whether the scaler that was saved scales.
        scales: bool,
    },

    /// A scaler state lacks one of its five required keys.
    #[error("the scaler state has no {key}; load one that state_dict() of tch-amp or PyTorch made")]
    MissingKey {
        /// The key.
        key: &'static str,
    },

    /// The text of a loss scale cannot be parsed.
    #[error(
        "cannot read the loss scale `{text}`: {problem}; write `none`, a number such as `1024`, `dynamic`, or `dynamic:65536` for one that starts there"
    )]
    LossScaleText {
        /// The text.
        text: String,
        /// The problem.
        problem: String,
    },

    /// A loss scale was given the state of another kind of loss scale.
    #[error(
        "a {expected} loss scale cannot load the state of a {found} one; make a loss scale of that kind with the state's `build`"
    )]
    OtherLossScale {
        /// The loss scale's kind.
        expected: &'static str,
        /// The state's kind.
        found: &'static str,
    },
}

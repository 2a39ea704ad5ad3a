//! What a step did.

#![forbid(unsafe_code)]

use crate::error::Result;

/// What [`GradScaler::step`](crate::GradScaler::step) did to its optimizer. PyTorch's `step` returns the optimizer's own
/// value, or `None`, which may mean either.
///
/// A learning-rate scheduler should advance only when the step was taken:
///
/// ```no_run
/// # fn train(scaler: &mut tch_amp::GradScaler, opt: &mut tch::nn::Optimizer, lr: f64) -> tch_amp::Result<()> {
/// if scaler.step(opt)?.is_stepped()? {
///     opt.set_lr(lr * 0.99);
/// }
/// # Ok(()) }
/// ```
#[derive(Debug)]
#[must_use = "a skipped step is silent otherwise; `let _outcome = …` says that you do not care"]
pub struct StepOutcome(pub(crate) Step);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Stepped,
    Skipped,
    NoGradients,
}

impl StepOutcome {
    /// Tells whether the optimizer was stepped.
    ///
    /// For an optimizer that the host steps, such as tch's own, the answer is at hand and asking costs nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`](crate::Error::Torch) if an answer on a device cannot be read.
    pub fn is_stepped(&self) -> Result<bool> {
        Ok(self.0 == Step::Stepped)
    }

    /// Tells whether the step was left out because a gradient was infinite or NaN. Then nothing was changed.
    ///
    /// # Errors
    ///
    /// As [`is_stepped`](Self::is_stepped).
    pub fn is_skipped(&self) -> Result<bool> {
        Ok(self.0 == Step::Skipped)
    }

    /// Tells whether the step was left out because no parameter had a gradient. PyTorch fails there.
    pub fn has_no_gradients(&self) -> bool {
        self.0 == Step::NoGradients
    }
}

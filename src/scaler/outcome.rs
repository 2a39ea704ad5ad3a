//! What a step did.

use std::cell::{Cell, OnceCell};

use tch::Tensor;

use crate::error::Result;
use crate::ffi::{Arrival, OutsideRegions};

/// Reports whether [`GradScaler::step`](crate::GradScaler::step) stepped its optimizer. PyTorch's `step` returns the
/// optimizer's own return value, or `None`, which can mean either.
///
/// After a step of a fused optimizer on a GPU the answer is on the GPU, and reading it synchronizes, once;
/// [`poll`](Self::poll) never does. In all other cases the host has the answer already. Advance a learning-rate
/// scheduler only when the step was taken:
///
/// ```no_run
/// # fn train(scaler: &mut tch_amp::GradScaler, opt: &mut tch::nn::Optimizer, lr: f64) -> tch_amp::Result<()> {
/// if scaler.step(opt)?.is_stepped()? {
///     opt.set_lr(lr * 0.99);
/// }
/// # Ok(()) }
/// ```
#[derive(Debug)]
#[must_use = "a skipped step is silent otherwise; bind it to `_outcome` to ignore it"]
pub struct StepOutcome {
    answer: Answer,
    total_norm: Option<Tensor>,
    #[cfg(feature = "insight")]
    judged: Option<Judged>,
}

/// What a detector of spikes has judged.
#[cfg(feature = "insight")]
#[derive(Debug)]
pub(crate) struct Judged {
    pub(crate) norm: Tensor,
    pub(crate) loss: Option<Tensor>,
}

#[cfg(feature = "insight")]
impl Judged {
    /// Whether a skipped step was a spike, because nothing overflowed. Synchronizes.
    pub(crate) fn is_finite(&self) -> Result<bool> {
        let _own = OutsideRegions::enter();
        let mut numbers = [Some(&self.norm), self.loss.as_ref()].into_iter().flatten();
        numbers.try_fold(true, |all, number| Ok(all && number.f_double_value(&[])?.is_finite()))
    }
}

#[derive(Debug)]
enum Answer {
    Known(Taken),
    OnDevice(Pending),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    Stepped,
    Skipped,
    NoGradients,
}

/// An answer on a device.
#[derive(Debug)]
struct Pending {
    found_inf: Tensor,
    arrival: OnceCell<Arrival>,
    skipped: Cell<Option<bool>>,
}

impl Pending {
    /// Reads the answer. Synchronizes.
    fn wait(&self) -> Result<bool> {
        let _own = OutsideRegions::enter();
        if let Some(skipped) = self.skipped.get() {
            return Ok(skipped);
        }
        let skipped = self.found_inf.f_double_value(&[])? != 0.0;
        self.skipped.set(Some(skipped));
        Ok(skipped)
    }

    fn poll(&self) -> Result<Option<bool>> {
        if self.skipped.get().is_none() {
            let arrival = match self.arrival.get() {
                Some(arrival) => arrival,
                None => {
                    let arrival = Arrival::new(&self.found_inf)?;
                    self.arrival.get_or_init(|| arrival)
                }
            };
            self.skipped.set(arrival.poll()?.map(|flag| flag != 0.0));
        }
        Ok(self.skipped.get())
    }
}

impl StepOutcome {
    pub(crate) fn known(taken: Taken) -> Self {
        Self::new(Answer::Known(taken))
    }

    /// An outcome that is skipped if `found_inf`, an f32 tensor on a device, is not zero.
    pub(crate) fn on_device(found_inf: Tensor) -> Self {
        let pending = Pending { found_inf, arrival: OnceCell::new(), skipped: Cell::new(None) };
        Self::new(Answer::OnDevice(pending))
    }

    fn new(answer: Answer) -> Self {
        Self {
            answer,
            total_norm: None,
            #[cfg(feature = "insight")]
            judged: None,
        }
    }

    pub(crate) fn with_norm(self, total_norm: Option<Tensor>) -> Self {
        Self { total_norm, ..self }
    }

    #[cfg(feature = "insight")]
    pub(crate) fn with_judged(self, judged: Judged) -> Self {
        Self { judged: Some(judged), ..self }
    }

    /// What a detector of spikes has judged, if one decided about the step.
    #[cfg(feature = "insight")]
    pub(crate) fn judged(&self) -> Option<&Judged> {
        self.judged.as_ref()
    }

    /// Whether the step was taken, if the host has the answer.
    #[cfg(feature = "insight")]
    pub(crate) fn known_taken(&self) -> Option<Taken> {
        match &self.answer {
            Answer::Known(taken) => Some(*taken),
            Answer::OnDevice(_) => None,
        }
    }

    /// The flag on a device that says whether the step was skipped, whether or not it has arrived at the host.
    pub(crate) fn flag(&self) -> Option<&Tensor> {
        match &self.answer {
            Answer::Known(_) => None,
            Answer::OnDevice(pending) => Some(&pending.found_inf),
        }
    }

    fn taken(&self) -> Result<Taken> {
        match &self.answer {
            Answer::Known(taken) => Ok(*taken),
            Answer::OnDevice(pending) if pending.wait()? => Ok(Taken::Skipped),
            Answer::OnDevice(_) => Ok(Taken::Stepped),
        }
    }

    /// Returns whether the optimizer was stepped. Synchronizes if only the device has the answer.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`](crate::Error::Torch) if an answer on a device cannot be read.
    pub fn is_stepped(&self) -> Result<bool> {
        Ok(self.taken()? == Taken::Stepped)
    }

    /// Returns whether the step was skipped because a gradient was infinite or NaN; nothing was changed then.
    /// Synchronizes like [`is_stepped`](Self::is_stepped).
    ///
    /// # Errors
    ///
    /// The same as [`is_stepped`](Self::is_stepped).
    pub fn is_skipped(&self) -> Result<bool> {
        Ok(self.taken()? == Taken::Skipped)
    }

    /// Returns whether the optimizer was stepped, or `None` while only the device has the answer. Never synchronizes.
    /// [`StepCounter`](crate::scaler::StepCounter) uses this to count steps.
    ///
    /// # Errors
    ///
    /// The same as [`is_stepped`](Self::is_stepped).
    pub fn poll(&self) -> Result<Option<bool>> {
        match &self.answer {
            Answer::Known(taken) => Ok(Some(*taken == Taken::Stepped)),
            Answer::OnDevice(pending) => Ok(pending.poll()?.map(|skipped| !skipped)),
        }
    }

    /// Returns whether the step was omitted because no parameter had a gradient. PyTorch raises an error in that case.
    /// Never synchronizes.
    pub fn has_no_gradients(&self) -> bool {
        matches!(self.answer, Answer::Known(Taken::NoGradients))
    }

    /// Returns the 2-norm of the unscaled gradients before clipping, as computed by
    /// [`step_clip_norm`](crate::GradScaler::step_clip_norm): a 0-dim tensor on the device of the first gradient.
    /// `None` after [`step`](crate::GradScaler::step), and if there were no gradients.
    pub fn total_norm(&self) -> Option<&Tensor> {
        self.total_norm.as_ref()
    }
}

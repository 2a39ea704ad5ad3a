//! The outcome of a step.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::Tensor;

use crate::capture;
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::ffi::{Arrival, OutsideRegions};

/// Reports whether [`GradScaler::step`](crate::GradScaler::step) stepped its optimizer. PyTorch's `step` returns the
/// optimizer's own return value, or `None`, which can mean either.
///
/// After a step of a fused optimizer on a GPU the answer is on the GPU, and reading it synchronizes, once;
/// [`poll`](Self::poll) never does. In all other cases the host has the answer already. A clone has the same answer,
/// which is copied from the GPU once for all of them. An outcome may be ignored. Advance a learning-rate scheduler only
/// when the step was taken:
///
/// ```no_run
/// # fn train(scaler: &mut tch_amp::GradScaler, opt: &mut tch::nn::Optimizer, lr: f64) -> tch_amp::Result<()> {
/// if scaler.step(opt)?.is_stepped()? {
///     opt.set_lr(lr * 0.99);
/// }
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct StepOutcome {
    answer: Answer,
    total_norm: Option<Tensor>,
    #[cfg(feature = "insight")]
    judged: Option<Judged>,
    /// In an iteration of a graph, the learning rate on the device.
    #[cfg(feature = "insight")]
    learning_rate: Option<capture::IterationTensor>,
}

/// The judgement of a detector of spikes.
#[cfg(feature = "insight")]
#[derive(Debug)]
pub(crate) struct Judged {
    pub(crate) norm: Tensor,
    pub(crate) loss: Option<Tensor>,
}

#[cfg(feature = "insight")]
impl Judged {
    /// Returns whether a skipped step was a spike, because nothing overflowed. Synchronizes.
    pub(crate) fn is_finite(&self) -> Result<bool> {
        let _own = OutsideRegions::enter();
        let mut numbers = [Some(&self.norm), self.loss.as_ref()].into_iter().flatten();
        numbers.try_fold(true, |all, number| Ok(all && number.f_double_value(&[])?.is_finite()))
    }
}

#[cfg(feature = "insight")]
impl Clone for Judged {
    fn clone(&self) -> Self {
        Self {
            norm: self.norm.shallow_clone(),
            loss: self.loss.as_ref().map(Tensor::shallow_clone),
        }
    }
}

/// The answer to whether a step was taken: the part of an outcome that is worth keeping for later.
#[derive(Clone, Debug)]
pub(crate) enum Answer {
    Known(StepResult),
    OnDevice(Pending),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StepResult {
    Stepped,
    Skipped,
    NoGradients,
}

/// An answer on a device.
#[derive(Debug)]
pub(crate) struct Pending {
    /// The capture whose replays overwrite the flag.
    captured: Option<capture::CaptureId>,
    found_inf: Tensor,
    /// Common to all clones.
    transfer: Arc<Mutex<Transfer>>,
}

/// How far an answer has come on its way to the host.
#[derive(Debug, Default)]
struct Transfer {
    arrival: Option<Arrival>,
    skipped: Option<bool>,
}

impl Clone for Pending {
    fn clone(&self) -> Self {
        Self {
            captured: self.captured,
            found_inf: self.found_inf.shallow_clone(),
            transfer: self.transfer.clone(),
        }
    }
}

impl Pending {
    fn transfer(&self) -> MutexGuard<'_, Transfer> {
        self.transfer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fails for the outcome of a captured step, whose flag each replay overwrites.
    fn refuse_captured(&self, call: &'static str) -> Result<()> {
        match self.captured {
            Some(_) => Err(capture::refusal(call, "ask one of `Replay::outcomes`")),
            None => Ok(()),
        }
    }

    /// The flag. Fails outside of the capture whose replays overwrite it, and in a capture for another flag, which
    /// would be that of one iteration in all replays.
    fn flag(&self) -> Result<&Tensor> {
        match capture::id() {
            None => {
                self.refuse_captured("the outcome of a captured step outside of its iteration")?
            }
            here if here == self.captured => {}
            Some(_) => {
                let remedy = "pass on the outcome of a step of the same iteration";
                return Err(capture::refusal("the outcome of another iteration", remedy));
            }
        }
        Ok(&self.found_inf)
    }

    /// Reads the answer. Synchronizes, and does not hold up a `poll` of another thread meanwhile.
    fn wait(&self) -> Result<bool> {
        self.refuse_captured("is_stepped")?;
        let _own = OutsideRegions::enter();
        let known = self.transfer().skipped;
        if let Some(skipped) = known {
            return Ok(skipped);
        }
        let skipped = self.found_inf.f_double_value(&[])? != 0.0;
        self.transfer().skipped = Some(skipped);
        Ok(skipped)
    }

    fn poll(&self) -> Result<Option<bool>> {
        self.refuse_captured("poll")?;
        let mut transfer = self.transfer();
        if transfer.skipped.is_none() {
            let arrival = match &transfer.arrival {
                Some(arrival) => arrival,
                None => transfer.arrival.insert(Arrival::new(&self.found_inf)?),
            };
            transfer.skipped = arrival.poll()?.map(|flag| flag != 0.0);
        }
        Ok(transfer.skipped)
    }
}

impl Answer {
    fn taken(&self) -> Result<StepResult> {
        match self {
            Self::Known(taken) => Ok(*taken),
            Self::OnDevice(pending) if pending.wait()? => Ok(StepResult::Skipped),
            Self::OnDevice(_) => Ok(StepResult::Stepped),
        }
    }

    /// Returns whether the step was taken. Synchronizes if only the device has the answer.
    pub(crate) fn is_stepped(&self) -> Result<bool> {
        Ok(self.taken()? == StepResult::Stepped)
    }

    /// Returns whether the step was taken, or `None` while only the device has the answer. Never synchronizes.
    pub(crate) fn poll(&self) -> Result<Option<bool>> {
        match self {
            Self::Known(taken) => Ok(Some(*taken == StepResult::Stepped)),
            Self::OnDevice(pending) => Ok(pending.poll()?.map(|skipped| !skipped)),
        }
    }

    pub(crate) fn has_no_gradients(&self) -> bool {
        matches!(self, Self::Known(StepResult::NoGradients))
    }

    /// The flag on the device that says whether the step was skipped, if the host does not know. Fails for one that is
    /// of another iteration than a graph's.
    pub(crate) fn flag(&self) -> Result<Option<&Tensor>> {
        match self {
            Self::Known(_) => Ok(None),
            Self::OnDevice(pending) => pending.flag().map(Some),
        }
    }
}

impl Clone for StepOutcome {
    fn clone(&self) -> Self {
        Self {
            answer: self.answer.clone(),
            total_norm: self.total_norm.as_ref().map(Tensor::shallow_clone),
            #[cfg(feature = "insight")]
            judged: self.judged.clone(),
            #[cfg(feature = "insight")]
            learning_rate: self.learning_rate.clone(),
        }
    }
}

/// The steps of an iteration of a graph.
pub(crate) mod noted {
    use std::cell::RefCell;

    use super::{Answer, Pending, StepOutcome};
    use crate::error::Result;
    use crate::ffi::OutsideRegions;
    use crate::panics::Exchanged;

    thread_local! {
        static NOTED: RefCell<Option<Vec<Answer>>> = const { RefCell::new(None) };
    }

    pub(super) fn note(answer: &Answer) {
        let note = |noted: &mut Vec<Answer>| noted.push(answer.clone());
        NOTED.with_borrow_mut(|noted| noted.as_mut().map_or((), note));
    }

    /// Runs an iteration, and returns the answers of its steps.
    pub(crate) fn during<T>(f: impl FnOnce() -> T) -> (T, Vec<Answer>) {
        let noted = Exchanged::new(&NOTED, Some(Vec::new()));
        let out = f();
        (out, noted.end().flatten().unwrap_or_default())
    }

    impl StepOutcome {
        /// The outcome of a step by its answer. That of a captured step is the last replay's, and is copied.
        pub(crate) fn of(answer: &Answer) -> Result<Self> {
            let _own = OutsideRegions::enter();
            Ok(match answer {
                Answer::OnDevice(Pending { captured: Some(_), found_inf, .. }) => {
                    Self::on_device(found_inf.f_detach_copy()?)
                }
                answer => Self::new(answer.clone()),
            })
        }
    }
}

impl StepOutcome {
    pub(crate) fn known(taken: StepResult) -> Self {
        Self::new(Answer::Known(taken))
    }

    /// An outcome that is skipped if `found_inf`, an f32 tensor on a device, is not zero.
    pub(crate) fn on_device(found_inf: Tensor) -> Self {
        let pending = Pending { captured: capture::id(), found_inf, transfer: Arc::default() };
        Self::new(Answer::OnDevice(pending))
    }

    fn new(answer: Answer) -> Self {
        noted::note(&answer);
        Self {
            answer,
            total_norm: None,
            #[cfg(feature = "insight")]
            judged: None,
            #[cfg(feature = "insight")]
            learning_rate: capture::take_learning_rate(),
        }
    }

    pub(crate) fn with_norm(self, total_norm: Option<Tensor>) -> Self {
        Self { total_norm, ..self }
    }

    #[cfg(feature = "insight")]
    pub(crate) fn with_judged(self, judged: Judged) -> Self {
        Self { judged: Some(judged), ..self }
    }

    /// Returns the judgement of a detector of spikes, if one decided about the step.
    #[cfg(feature = "insight")]
    pub(crate) fn judged(&self) -> Option<&Judged> {
        self.judged.as_ref()
    }

    /// In an iteration of a graph, the learning rate on the device. Fails in a capture for that of another iteration.
    #[cfg(feature = "insight")]
    pub(crate) fn learning_rate(&self) -> Result<Option<&Tensor>> {
        let lr = self.learning_rate.as_ref();
        lr.map(|lr| lr.get("the outcome of another iteration")).transpose()
    }

    /// Returns whether the step was taken, if the host has the answer.
    #[cfg(feature = "insight")]
    pub(crate) fn known_taken(&self) -> Option<StepResult> {
        match &self.answer {
            Answer::Known(taken) => Some(*taken),
            Answer::OnDevice(_) => None,
        }
    }

    /// The flag on a device that says whether the step was skipped, whether or not it has arrived at the host.
    pub(crate) fn flag(&self) -> Result<Option<&Tensor>> {
        self.answer.flag()
    }

    /// Returns whether the step was taken, to be kept for later without the rest of the outcome.
    pub(crate) fn answer(&self) -> &Answer {
        &self.answer
    }

    /// Returns whether the optimizer was stepped. Synchronizes if only the device has the answer.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if an answer on a device cannot be read.
    pub fn is_stepped(&self) -> Result<bool> {
        self.answer.is_stepped()
    }

    /// Returns whether the step was skipped because a gradient was infinite or NaN; nothing was changed then.
    /// Synchronizes like [`is_stepped`](Self::is_stepped).
    ///
    /// # Errors
    ///
    /// The same as [`is_stepped`](Self::is_stepped).
    pub fn is_skipped(&self) -> Result<bool> {
        Ok(self.answer.taken()? == StepResult::Skipped)
    }

    /// Returns whether the optimizer was stepped, or `None` while only the device has the answer. Never synchronizes.
    /// [`StepCounter`](crate::scaler::StepCounter) uses this to count steps.
    ///
    /// # Errors
    ///
    /// The same as [`is_stepped`](Self::is_stepped).
    pub fn poll(&self) -> Result<Option<bool>> {
        self.answer.poll()
    }

    /// Returns whether the step was omitted because no parameter had a gradient. PyTorch raises an error in that case.
    /// Never synchronizes.
    pub fn has_no_gradients(&self) -> bool {
        self.answer.has_no_gradients()
    }

    /// Returns the norm of the unscaled gradients before clipping, of the type that
    /// [`step_clip_norm`](crate::GradScaler::step_clip_norm) was given: a 0-dim tensor on the device of the first
    /// gradient. `None` after [`step`](crate::GradScaler::step), and if there were no gradients.
    pub fn total_norm(&self) -> Option<&Tensor> {
        self.total_norm.as_ref()
    }
}

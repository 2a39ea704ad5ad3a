//! What a step did, and the counts of what several did.

use std::collections::VecDeque;
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

#[cfg(feature = "insight")]
impl Clone for Judged {
    fn clone(&self) -> Self {
        Self {
            norm: self.norm.shallow_clone(),
            loss: self.loss.as_ref().map(Tensor::shallow_clone),
        }
    }
}

/// Whether a step was taken: the part of an outcome that is worth keeping for later.
#[derive(Clone, Debug)]
pub(crate) enum Answer {
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
pub(crate) struct Pending {
    /// Whether the flag is that of whichever replay was last.
    #[cfg(feature = "graph")]
    is_captured: bool,
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
            #[cfg(feature = "graph")]
            is_captured: self.is_captured,
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
    #[cfg(feature = "graph")]
    fn refuse_captured(&self, call: &'static str) -> Result<()> {
        match self.is_captured {
            true => Err(capture::refusal(call, "ask one of `Replay::outcomes`")),
            false => Ok(()),
        }
    }

    #[cfg(not(feature = "graph"))]
    fn refuse_captured(&self, _call: &'static str) -> Result<()> {
        Ok(())
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
    fn taken(&self) -> Result<Taken> {
        match self {
            Self::Known(taken) => Ok(*taken),
            Self::OnDevice(pending) if pending.wait()? => Ok(Taken::Skipped),
            Self::OnDevice(_) => Ok(Taken::Stepped),
        }
    }

    /// Whether the step was taken. Synchronizes if only the device has the answer.
    pub(crate) fn is_stepped(&self) -> Result<bool> {
        Ok(self.taken()? == Taken::Stepped)
    }

    /// Whether the step was taken, or `None` while only the device has the answer. Never synchronizes.
    pub(crate) fn poll(&self) -> Result<Option<bool>> {
        match self {
            Self::Known(taken) => Ok(Some(*taken == Taken::Stepped)),
            Self::OnDevice(pending) => Ok(pending.poll()?.map(|skipped| !skipped)),
        }
    }

    pub(crate) fn has_no_gradients(&self) -> bool {
        matches!(self, Self::Known(Taken::NoGradients))
    }

    /// The flag on the device that says whether the step was skipped, if the host does not know.
    pub(crate) fn flag(&self) -> Option<&Tensor> {
        match self {
            Self::Known(_) => None,
            Self::OnDevice(pending) => Some(&pending.found_inf),
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
        }
    }
}

/// The steps of an iteration of a graph.
#[cfg(feature = "graph")]
pub(crate) mod noted {
    use std::cell::RefCell;

    use super::{Answer, Pending, StepOutcome};
    use crate::error::Result;
    use crate::ffi::OutsideRegions;

    thread_local! {
        static NOTED: RefCell<Option<Vec<Answer>>> = const { RefCell::new(None) };
    }

    pub(super) fn note(answer: &Answer) {
        let note = |noted: &mut Vec<Answer>| noted.push(answer.clone());
        NOTED.with_borrow_mut(|noted| noted.as_mut().map_or((), note));
    }

    /// Runs an iteration, and returns the answers of its steps.
    pub(crate) fn during<T>(f: impl FnOnce() -> T) -> (T, Vec<Answer>) {
        struct Back(Option<Vec<Answer>>);
        impl Drop for Back {
            fn drop(&mut self) {
                NOTED.set(self.0.take());
            }
        }
        let back = Back(NOTED.replace(Some(Vec::new())));
        let out = f();
        let noted = NOTED.with_borrow_mut(Option::take);
        drop(back);
        (out, noted.unwrap_or_default())
    }

    impl StepOutcome {
        /// The outcome of a step by its answer. That of a captured step is the last replay's, and is copied.
        pub(crate) fn of(answer: &Answer) -> Result<Self> {
            let _own = OutsideRegions::enter();
            Ok(match answer {
                Answer::OnDevice(Pending { is_captured: true, found_inf, .. }) => {
                    Self::on_device(found_inf.f_detach_copy()?)
                }
                answer => Self::new(answer.clone()),
            })
        }
    }
}

impl StepOutcome {
    pub(crate) fn known(taken: Taken) -> Self {
        Self::new(Answer::Known(taken))
    }

    /// An outcome that is skipped if `found_inf`, an f32 tensor on a device, is not zero.
    pub(crate) fn on_device(found_inf: Tensor) -> Self {
        let pending = Pending {
            #[cfg(feature = "graph")]
            is_captured: capture::is_capturing(),
            found_inf,
            transfer: Arc::default(),
        };
        Self::new(Answer::OnDevice(pending))
    }

    fn new(answer: Answer) -> Self {
        #[cfg(feature = "graph")]
        noted::note(&answer);
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
        self.answer.flag()
    }

    /// Whether the step was taken, to be kept for later without the rest of the outcome.
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
        Ok(self.answer.taken()? == Taken::Skipped)
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

/// Counts the steps that were taken and those that were skipped, without ever synchronizing. Meant for learning-rate
/// schedules: in PyTorch a loop has to compare the scale before and after `update` to notice a skipped step, which
/// synchronizes.
///
/// On a GPU the counts lag by the steps still in flight; each is counted eventually. On a CPU they are exact. `Display`
/// prints a report such as `998 steps taken, 2 skipped (at most 1 in a row)`.
///
/// # Examples
///
/// ```no_run
/// # use tch_amp::GradScaler;
/// # use tch_amp::optim::Optimizer;
/// # use tch_amp::scaler::StepCounter;
/// # fn train(scaler: &mut GradScaler, opt: &mut Optimizer) -> tch_amp::Result<()> {
/// let mut taken = StepCounter::default();
/// for _ in 0..1000 {
///     // forward, backward …
///     taken.record(&scaler.step(opt)?);
///     scaler.update()?;
///     opt.set_lr(1e-3 * 0.999f64.powi(taken.count()? as i32))?;
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Default)]
pub struct StepCounter {
    taken: u64,
    skipped: u64,
    /// Steps skipped since the last one that was taken.
    in_a_row: u64,
    longest_row: u64,
    open: VecDeque<Answer>,
}

impl StepCounter {
    /// Makes a counter that continues from a saved [`count`](Self::count).
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Tensor};
    /// use tch_amp::GradScaler;
    /// use tch_amp::optim::Sgd;
    /// use tch_amp::scaler::StepCounter;
    ///
    /// # let w = Tensor::from_slice(&[1f32]).set_requires_grad(true);
    /// # let mut opt = Sgd::default().build(&[w.shallow_clone()], 0.1)?;
    /// # let mut scaler = GradScaler::new(Device::Cpu)?;
    /// let mut steps = StepCounter::starting_at(998);
    /// for gradient in [1.0, f64::INFINITY, 1.0] {
    ///     opt.zero_grad()?;
    ///     scaler.backward(&(&w * gradient).sum(None))?;
    ///     steps.record(&scaler.step(&mut opt)?);
    ///     scaler.update()?;
    /// }
    /// assert_eq!(steps.to_string(), "1000 steps taken, 1 skipped (at most 1 in a row)");
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn starting_at(taken: u64) -> Self {
        Self { taken, ..Self::default() }
    }

    /// Records the outcome of a step. A step without gradients counts neither as taken nor as skipped.
    pub fn record(&mut self, outcome: &StepOutcome) {
        // Starts the transfer of the answer; an error will occur again when the step is counted. In an iteration of a
        // graph it is not asked for, since that would break a capture.
        let asks = !capture::is_inside();
        if asks {
            drop(outcome.poll());
        }
        self.open.push_back(outcome.answer().clone());
        if asks {
            drop(self.poll());
        }
    }

    /// Returns how many of the recorded steps are known to have been taken. Never synchronizes.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if an answer on a device cannot be read.
    pub fn count(&mut self) -> Result<u64> {
        self.poll()?;
        Ok(self.taken)
    }

    /// Returns how many of the recorded steps are known to have been skipped. Never synchronizes.
    ///
    /// # Errors
    ///
    /// The same as [`count`](Self::count).
    pub fn skipped(&mut self) -> Result<u64> {
        self.poll()?;
        Ok(self.skipped)
    }

    /// Returns the number of consecutive skips up to the latest step whose outcome is known. Never synchronizes, so a
    /// loop can stop at a limit of its own without the synchronization that
    /// [`max_consecutive_skips`](crate::scaler::GradScalerConfig::max_consecutive_skips) needs.
    ///
    /// # Errors
    ///
    /// The same as [`count`](Self::count).
    pub fn consecutive_skips(&mut self) -> Result<u64> {
        self.poll()?;
        Ok(self.in_a_row)
    }

    /// Returns how many recorded steps were still unknown at the last count.
    pub fn pending(&self) -> usize {
        self.open.len()
    }

    fn poll(&mut self) -> Result<()> {
        capture::refuse("a count of steps", "read it after `replay`, of `Replay::outcomes`")?;
        while let Some(answer) = self.open.front() {
            let Some(taken) = answer.poll()? else {
                break;
            };
            if taken {
                // A loaded count may be any number.
                self.taken = self.taken.saturating_add(1);
                self.in_a_row = 0;
            } else if !answer.has_no_gradients() {
                self.skipped += 1;
                self.in_a_row += 1;
                self.longest_row = self.longest_row.max(self.in_a_row);
            }
            self.open.pop_front();
        }
        Ok(())
    }
}

/// Prints the counts as of the last count.
impl std::fmt::Display for StepCounter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} steps taken, {} skipped", self.taken, self.skipped)?;
        if self.skipped > 0 {
            write!(f, " (at most {} in a row)", self.longest_row)?;
        }
        match self.open.len() {
            0 => Ok(()),
            open => write!(f, ", {open} pending"),
        }
    }
}

//! What a step did, and the counts of what several did.

use std::cell::{Cell, OnceCell};
use std::collections::VecDeque;

use tch::Tensor;

#[cfg(doc)]
use crate::error::Error;
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
    /// [`Error::Torch`] if an answer on a device cannot be read.
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
///     taken.record(scaler.step(opt)?);
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
    open: VecDeque<StepOutcome>,
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
    ///     steps.record(scaler.step(&mut opt)?);
    ///     scaler.update()?;
    /// }
    /// assert_eq!(steps.to_string(), "1000 steps taken, 1 skipped (at most 1 in a row)");
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn starting_at(taken: u64) -> Self {
        Self { taken, ..Self::default() }
    }

    /// Records the outcome of a step. A step without gradients counts neither as taken nor as skipped.
    pub fn record(&mut self, outcome: StepOutcome) {
        // Starts the transfer of the answer; an error will occur again when the step is counted.
        drop(outcome.poll());
        self.open.push_back(outcome);
        drop(self.poll());
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
        while let Some(outcome) = self.open.front() {
            let Some(taken) = outcome.poll()? else {
                break;
            };
            if taken {
                // A loaded count may be any number.
                self.taken = self.taken.saturating_add(1);
                self.in_a_row = 0;
            } else if !outcome.has_no_gradients() {
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

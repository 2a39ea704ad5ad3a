//! Counting the steps that were taken and skipped.

use std::collections::VecDeque;

use crate::error::Result;
use crate::scaler::StepOutcome;

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
    /// [`Error::Torch`](crate::Error::Torch) if an answer on a device cannot be read.
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

//! Counting the steps that were taken.

#![forbid(unsafe_code)]

use std::collections::VecDeque;

use crate::StepOutcome;
use crate::error::Result;

/// Counts the steps that were taken and not skipped, without ever waiting for a device. For a learning-rate schedule:
/// PyTorch can only ask the scaler whether its scale has sunk, and waits for it.
///
/// On a GPU the count lags behind by the steps that the device has not come to; nothing is lost. On a CPU it is exact.
///
/// ```no_run
/// # use tch_amp::{GradScaler, optim::{Optimizer, TakenSteps}};
/// # fn train(scaler: &mut GradScaler, opt: &mut Optimizer) -> tch_amp::Result<()> {
/// let mut taken = TakenSteps::default();
/// for _ in 0..1000 {
///     // forward, backward …
///     taken.record(scaler.step(opt)?);
///     scaler.update()?;
///     opt.set_lr(1e-3 * 0.999f64.powi(taken.count()? as i32))?;
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Default)]
pub struct TakenSteps {
    taken: u64,
    open: VecDeque<StepOutcome>,
}

impl TakenSteps {
    /// Takes up what a step did.
    pub fn record(&mut self, outcome: StepOutcome) {
        // The answer sets out now; an error will come again when it is counted.
        drop(outcome.poll());
        self.open.push_back(outcome);
    }

    /// Returns how many of the recorded steps are known to have been taken. Never waits.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`](crate::Error::Torch) if an answer on a device cannot be read.
    pub fn count(&mut self) -> Result<u64> {
        while let Some(outcome) = self.open.front() {
            let Some(taken) = outcome.poll()? else {
                break;
            };
            self.taken += u64::from(taken);
            self.open.pop_front();
        }
        Ok(self.taken)
    }

    /// Returns how many recorded steps nothing is known of yet, as of the last [`count`](Self::count).
    pub fn pending(&self) -> usize {
        self.open.len()
    }
}

//! The numbers that most recipes measure: their columns in the log, which are also their names in TensorBoard.

use super::Ranks;
use super::memory::PeakMemory;
use anyhow::Result;
use std::mem;
use std::time::Instant;
use tch::{Device, Tensor};
use tch_amp::Amp;
use tch_amp::GradScaler;

/// A number of a step, with its column.
pub type Number = (&'static str, f64);

/// The mean loss of a step, before it was taken.
pub const LOSS: &str = "loss";
/// The loss on held-out data.
pub const HELD_OUT: &str = "held_out_loss";
/// The share of held-out data with the right answer.
pub const ACCURACY: &str = "accuracy";
/// The learning rate of the step.
pub const LEARNING_RATE: &str = "learning_rate";
/// The 2-norm of all gradients, before they were clipped.
pub const GRADIENT_NORM: &str = "gradient_norm";
/// The scale after the step, in fp16.
pub const SCALE: &str = "scale";
/// The most memory so far, of this rank, in bytes.
pub const PEAK_MEMORY: &str = "peak_memory";
/// What this rank has sent to the others in the step, in bytes.
pub const SENT: &str = "sent";

/// What a step has measured, on the device.
#[derive(Debug)]
pub struct Measured {
    /// Of this rank.
    pub loss: Tensor,
    /// Of the averaged gradients, if they were clipped.
    pub norm: Option<Tensor>,
    /// The learning rate of the step.
    pub lr: f64,
    /// The bytes that this rank has sent to the others, if they were counted.
    pub sent: Option<u64>,
}

/// Counts what is read, and measures memory.
#[derive(Debug)]
pub struct Meter {
    amp: Amp,
    memory: Option<PeakMemory>,
    /// The column of the rate, such as `images_per_second`.
    rate: &'static str,
    /// How many items all ranks have read since the last line of the log.
    pub count: usize,
}

impl Meter {
    /// Measures without memory. `rate` is the column of how many items all ranks read in a second, without evaluations
    /// but with the time that checkpoints take.
    pub fn new(amp: Amp, rate: &'static str) -> Self {
        Self { amp, memory: None, rate, count: 0 }
    }

    /// Measures the memory from now on, too.
    pub fn with_memory(self, device: Device) -> Self {
        Self { memory: PeakMemory::start(device), ..self }
    }

    /// Returns the numbers of a step. All ranks call this. Synchronizes.
    pub fn read(
        &mut self,
        measured: &Measured,
        since: Instant,
        scaler: &GradScaler,
        ranks: &Ranks,
    ) -> Result<Vec<Number>> {
        let mut numbers = vec![(LOSS, ranks.mean(&measured.loss)?), (LEARNING_RATE, measured.lr)];
        let norm = measured.norm.as_ref().map(|norm| (GRADIENT_NORM, norm.double_value(&[])));
        numbers.extend(norm);
        if self.amp == Amp::Fp16 {
            numbers.push((SCALE, scaler.get_scale()?));
        }
        let count = mem::take(&mut self.count) as f64;
        numbers.push((self.rate, count / since.elapsed().as_secs_f64()));
        let peak = self.memory.and_then(PeakMemory::read);
        numbers.extend(peak.map(|bytes| (PEAK_MEMORY, bytes as f64)));
        numbers.extend(measured.sent.map(|bytes| (SENT, bytes as f64)));
        Ok(numbers)
    }

    /// Shows the numbers of a step with the progress.
    pub fn words(&self, numbers: &[Number]) -> String {
        let mut words = format!("loss {:.3}", find(numbers, LOSS).unwrap_or(f64::NAN));
        if let Some(loss) = find(numbers, HELD_OUT) {
            words += &format!(", held-out {loss:.3}");
        }
        if let Some(accuracy) = find(numbers, ACCURACY) {
            words += &format!(", accuracy {:.1} %", 100.0 * accuracy);
        }
        if let Some(scale) = find(numbers, SCALE) {
            words += &format!(", scale {scale}");
        }
        let rate = find(numbers, self.rate).unwrap_or(f64::NAN);
        words + &format!(", {rate:.0} {}/s", self.rate.trim_end_matches("_per_second"))
    }
}

/// The number of a column, if it was measured.
pub fn find(numbers: &[Number], column: &str) -> Option<f64> {
    numbers.iter().find(|number| number.0 == column).map(|number| number.1)
}

//! The numbers of a run: what is logged, the evaluation on held-out text, and the sample.

use super::train::Trainer;
use crate::recipe::Precision;
use crate::recipe::memory::PeakMemory;
use anyhow::Result;
use std::time::Instant;
use tch::{Kind, Tensor, no_grad};

/// The columns of the log, and the names in TensorBoard.
pub const COLUMNS: [&str; 7] =
    [LOSS, HELD_OUT, LEARNING_RATE, GRADIENT_NORM, SCALE, TOKENS_PER_SECOND, PEAK_MEMORY];
/// The mean loss of a step, before it was taken, in nats per byte.
pub const LOSS: &str = "loss";
/// The loss of the averaged weights on held-out text.
pub const HELD_OUT: &str = "held_out_loss";
/// The learning rate of the step.
pub const LEARNING_RATE: &str = "learning_rate";
/// The 2-norm of all gradients, before they were clipped.
pub const GRADIENT_NORM: &str = "gradient_norm";
/// The scale after the step, in fp16.
pub const SCALE: &str = "scale";
/// Of all ranks, since the previous line of the log, without evaluations but with the time that checkpoints take.
pub const TOKENS_PER_SECOND: &str = "tokens_per_second";
/// The most memory so far, of this rank, in bytes.
pub const PEAK_MEMORY: &str = "peak_memory";

/// The batches of an evaluation, if the text has as many.
const EVAL_BATCHES: usize = 8;
const PROMPT: &str = "    pub fn ";

/// Numbers of a step, on the device.
pub struct Measured {
    /// Of this rank.
    pub loss: Tensor,
    /// Of the averaged gradients.
    pub norm: Option<Tensor>,
}

impl Trainer<'_> {
    /// Returns the numbers of a step for the log. All ranks call this.
    pub fn read(
        &mut self,
        measured: &Measured,
        lr: f64,
        since: Instant,
    ) -> Result<Vec<(&'static str, f64)>> {
        let mut numbers = vec![(LOSS, self.ranks.mean(&measured.loss)?), (LEARNING_RATE, lr)];
        let norm = measured.norm.as_ref().map(|norm| (GRADIENT_NORM, norm.double_value(&[])));
        numbers.extend(norm);
        if self.options.common.amp == Precision::Fp16 {
            numbers.push((SCALE, self.scaler.get_scale()?));
        }
        let tokens = std::mem::take(&mut self.tokens) as f64;
        numbers.push((TOKENS_PER_SECOND, tokens / since.elapsed().as_secs_f64()));
        let peak = self.memory.and_then(PeakMemory::read);
        numbers.extend(peak.map(|bytes| (PEAK_MEMORY, bytes as f64)));
        Ok(numbers)
    }

    /// Returns the loss of the averaged weights on held-out text, in nats per byte.
    pub fn evaluate(&mut self) -> Result<f64> {
        let place = [self.ranks.rank(), self.ranks.size()];
        let _averages = self.ema.swap_in()?;
        let (mut sum, mut batches) = (Tensor::zeros([1], (Kind::Float, self.device)), 0);
        for (tokens, targets) in
            self.reader.held_out(self.options.rows, EVAL_BATCHES, place, self.device)
        {
            sum += no_grad(|| self.region.run(|| self.model.loss(&tokens, &targets, false)))?;
            batches += 1;
        }
        Ok(self.ranks.mean(&sum)? / f64::from(batches))
    }

    /// Returns a text that the averaged weights write.
    pub fn write(&mut self, bytes: usize) -> Result<String> {
        // The same text for the same weights.
        tch::manual_seed(self.options.common.seed);
        let _averages = self.ema.swap_in()?;
        Ok(no_grad(|| self.region.run(|| self.model.write(PROMPT, bytes, self.device)))?)
    }
}

/// The numbers of a step that are shown with the progress.
pub fn words(numbers: &[(&str, f64)]) -> String {
    let find = |name| numbers.iter().find(|number| number.0 == name).map(|number| number.1);
    let mut words = format!("loss {:.3}", find(LOSS).unwrap_or(f64::NAN));
    if let Some(loss) = find(HELD_OUT) {
        words += &format!(", held-out {loss:.3}");
    }
    if let Some(scale) = find(SCALE) {
        words += &format!(", scale {scale}");
    }
    words + &format!(", {:.0} tokens/s", find(TOKENS_PER_SECOND).unwrap_or(f64::NAN))
}

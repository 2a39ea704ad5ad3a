//! The numbers of a run: what is logged, and the evaluation on held-out sentences.

use super::batch::Sentences;
use super::train::{Measured, Trainer};
use crate::recipe::{Confusion, Precision};
use anyhow::Result;
use std::time::Instant;
use tch::{Tensor, no_grad};

/// The columns of the log, and the names in TensorBoard.
pub const COLUMNS: [&str; 7] =
    [LOSS, HELD_OUT, ACCURACY, LEARNING_RATE, GRADIENT_NORM, SCALE, RATE];
/// The loss of a step, before it was taken.
pub const LOSS: &str = "loss";
/// The loss on held-out sentences.
pub const HELD_OUT: &str = "held_out_loss";
/// The share of held-out sentences with the right answer.
pub const ACCURACY: &str = "accuracy";
/// The learning rate of the step.
pub const LEARNING_RATE: &str = "learning_rate";
/// The 2-norm of all gradients, before they were clipped.
pub const GRADIENT_NORM: &str = "gradient_norm";
/// The scale after the step, in fp16.
pub const SCALE: &str = "scale";
/// Of all ranks, since the previous line of the log.
pub const RATE: &str = "sentences_per_second";

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
        let read = std::mem::take(&mut self.read) as f64;
        numbers.push((RATE, read / since.elapsed().as_secs_f64()));
        Ok(numbers)
    }

    /// Classifies all these sentences. Each rank takes a part, and all of them get all logits.
    pub fn evaluate(&self, sentences: &Sentences) -> Result<Confusion> {
        let (mut logits, mut labels) = (Vec::new(), Vec::new());
        for batch in sentences.in_order(self.options.rows) {
            let part = batch.map(|tensor| self.ranks.share(tensor)).to(self.device);
            let part = no_grad(|| self.region.run(|| self.model.logits(&part, false)))?;
            logits.push(self.ranks.gather(&part)?);
            labels.push(batch.labels);
        }
        // The last batch has some sentences twice.
        let count = sentences.len() as i64;
        let logits = Tensor::cat(&logits, 0).narrow(0, 0, count).to_device(tch::Device::Cpu);
        let labels = Tensor::cat(&labels, 0).narrow(0, 0, count);
        Confusion::new(&logits, &labels)
    }
}

/// The numbers of a step that are shown with the progress.
pub fn words(numbers: &[(&str, f64)]) -> String {
    let find = |name| numbers.iter().find(|number| number.0 == name).map(|number| number.1);
    let mut words = format!("loss {:.3}", find(LOSS).unwrap_or(f64::NAN));
    if let (Some(loss), Some(accuracy)) = (find(HELD_OUT), find(ACCURACY)) {
        words += &format!(", held-out {loss:.3}, accuracy {:.1} %", 100.0 * accuracy);
    }
    if let Some(scale) = find(SCALE) {
        words += &format!(", scale {scale}");
    }
    words + &format!(", {:.0} sentences/s", find(RATE).unwrap_or(f64::NAN))
}

//! The numbers of a run: what is logged, the evaluation on held-out images, and the test of the averaged weights.

use super::batch::Pictures;
use super::model::MOMENTUM;
use super::train::{Network, Trainer};
use crate::recipe::memory::PeakMemory;
use crate::recipe::{Confusion, Precision};
use anyhow::Result;
use std::time::Instant;
use tch::{Device, Tensor, no_grad};

/// The columns of the log, and the names in TensorBoard.
pub const COLUMNS: [&str; 7] =
    [LOSS, HELD_OUT, ACCURACY, LEARNING_RATE, SCALE, IMAGES_PER_SECOND, PEAK_MEMORY];
/// The loss of a step, before it was taken.
pub const LOSS: &str = "loss";
/// The loss of the weights of the step on held-out images.
pub const HELD_OUT: &str = "held_out_loss";
/// The share of held-out images with the right answer.
pub const ACCURACY: &str = "accuracy";
/// The learning rate of the step.
pub const LEARNING_RATE: &str = "learning_rate";
/// The scale after the step, in fp16.
pub const SCALE: &str = "scale";
/// Of all ranks, since the previous line of the log, without evaluations but with the time that checkpoints take.
pub const IMAGES_PER_SECOND: &str = "images_per_second";
/// The most memory so far, of this rank, in bytes.
pub const PEAK_MEMORY: &str = "peak_memory";

/// The answers on the images of the test.
#[derive(Debug)]
pub struct Tested {
    /// Of the averaged weights.
    pub averaged: Confusion,
    /// Of the last weights.
    pub last: Confusion,
}

impl Trainer<'_> {
    /// Returns the numbers of a step for the log. All ranks call this.
    pub fn read(
        &mut self,
        loss: &Tensor,
        lr: f64,
        since: Instant,
    ) -> Result<Vec<(&'static str, f64)>> {
        let mut numbers = vec![(LOSS, self.network.ranks.mean(loss)?), (LEARNING_RATE, lr)];
        if self.options.common.amp == Precision::Fp16 {
            numbers.push((SCALE, self.scaler.get_scale()?));
        }
        let read = std::mem::take(&mut self.read) as f64;
        numbers.push((IMAGES_PER_SECOND, read / since.elapsed().as_secs_f64()));
        let peak = self.memory.and_then(PeakMemory::read);
        numbers.extend(peak.map(|bytes| (PEAK_MEMORY, bytes as f64)));
        Ok(numbers)
    }

    /// Classifies the held-out images with the weights of now.
    pub fn evaluate(&self) -> Result<Confusion> {
        self.network.ranks.same_buffers(&self.vs)?;
        self.network.classify(&self.set.held_out, self.options.rows)
    }

    /// Classifies the images of the test with the last weights and with the averaged ones.
    pub fn test(&mut self) -> Result<Tested> {
        let rows = self.options.rows;
        self.network.ranks.same_buffers(&self.vs)?;
        let last = self.network.classify(&self.set.test, rows)?;
        if self.swa.updates()? == 0 {
            // All steps whose weights were to be averaged were skipped.
            self.swa.advance()?;
        }
        self.update_batch_norm()?;
        let _averages = self.swa.swap_in()?;
        Ok(Tested { averaged: self.network.classify(&self.set.test, rows)?, last })
    }

    /// Computes the statistics of batch normalization for the averaged weights, from images to learn. They are the same
    /// on all ranks: those of whole batches, which each rank takes, or shares with the others if their statistics are
    /// synchronized.
    fn update_batch_norm(&mut self) -> Result<()> {
        let (network, train, rows) = (&self.network, &self.set.train, self.options.rows);
        let is_shared = self.options.sync_batch_norm;
        let (skipped, every) =
            if is_shared { (network.ranks.rank(), network.ranks.size()) } else { (0, 1) };
        let mut reader = self.reader.clone();
        reader.position = 0;
        let batches = (0..self.options.swa_batches).map(|_| {
            let views: Vec<_> =
                reader.next(rows).into_iter().skip(skipped).step_by(every).collect();
            train.take(&views)
        });
        self.swa.update_batch_norm(MOMENTUM, batches, |batch| network.logits(&batch, true))?;
        Ok(())
    }
}

impl Network<'_> {
    /// Classifies all these images. Each rank takes a part, and all of them get all logits.
    fn classify(&self, pictures: &Pictures, rows: usize) -> Result<Confusion> {
        let (rank, size) = (self.ranks.rank(), self.ranks.size());
        let (mut logits, mut labels) = (Vec::new(), Vec::new());
        for views in pictures.in_order(rows) {
            let part: Vec<_> = views.into_iter().skip(rank).step_by(size).collect();
            let batch = pictures.take(&part);
            logits.push(self.ranks.gather(&no_grad(|| self.logits(&batch, false))?)?);
            labels.push(self.ranks.gather(&batch.labels)?);
        }
        // The last batch has some images twice.
        let all = |parts: &[Tensor]| {
            Tensor::cat(parts, 0).narrow(0, 0, pictures.len() as i64).to_device(Device::Cpu)
        };
        Confusion::new(&all(&logits), &all(&labels))
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
    words + &format!(", {:.0} images/s", find(IMAGES_PER_SECOND).unwrap_or(f64::NAN))
}

//! The test of the last and of the averaged weights.

use super::batch::Pictures;
use super::model::MOMENTUM;
use super::train::{Network, Trainer};
use crate::Confusion;
use anyhow::Result;
use tch::{Device, Tensor, no_grad};

/// The answers on the images of the test.
#[derive(Debug)]
pub struct Tested {
    /// Of the averaged weights.
    pub averaged: Confusion,
    /// Of the last weights.
    pub last: Confusion,
}

impl Trainer<'_> {
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
    pub(super) fn classify(&self, pictures: &Pictures, rows: usize) -> Result<Confusion> {
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

//! Several processes that train the digits together, by DistributedDataParallel.

use anyhow::{Result, ensure};
use tch::Tensor;
use tch::nn::VarStore;
use tch_amp::GradScaler;
use tch_amp::distributed::{DistributedDataParallel, ProcessGroup, ReduceOp, Spawned, spawn};

/// The ranks that train together, or this process alone.
#[derive(Debug)]
pub struct Ranks(Option<ProcessGroup>);

impl Ranks {
    /// This process alone.
    pub fn alone() -> Self {
        Self(None)
    }

    /// Starts this program as several ranks, if their number is given; `None` in the process that has started them.
    pub fn start(ranks: Option<usize>) -> Result<Option<Self>> {
        let Some(ranks) = ranks else { return Ok(Some(Self::alone())) };
        if spawn(ranks)? == Spawned::Finished {
            return Ok(None);
        }
        Ok(Some(Self(Some(ProcessGroup::from_env()?))))
    }

    /// Whether this rank shows the progress, saves the checkpoints and writes the report.
    pub fn is_first(&self) -> bool {
        self.0.as_ref().is_none_or(|group| group.rank() == 0)
    }

    /// Returns this rank's share of a batch: every second row with two ranks.
    pub fn share(&self, batch: &Tensor) -> Tensor {
        let Some(group) = &self.0 else { return batch.shallow_clone() };
        batch.slice(0, group.rank() as i64, None, group.size() as i64)
    }

    /// Returns the mean of all ranks.
    pub fn mean(&self, loss: &Tensor) -> Result<f64> {
        let mut loss = loss.detach().copy();
        if let Some(group) = &self.0 {
            group.all_reduce(&mut loss, ReduceOp::Mean)?;
        }
        Ok(loss.double_value(&[]))
    }

    /// Returns what averages the gradients of these variables over the ranks.
    pub fn gradients(&self, vs: &VarStore) -> Result<Gradients> {
        let ddp = self.0.as_ref().map(|group| DistributedDataParallel::new(group, vs));
        Ok(Gradients(ddp.transpose()?))
    }

    /// Says in one sentence what the ranks did, after it was checked that they have the same weights.
    pub fn sentence(&self, batch: i64) -> Option<String> {
        let ranks = self.0.as_ref()?.size();
        Some(format!(
            "{ranks} processes trained together: each one computed the gradients of its share of every batch of {batch} \
             images, and they were averaged, so that all processes have the same weights, bit by bit."
        ))
    }

    /// Fails unless all ranks have the same weights.
    pub fn check_weights(&self, vs: &VarStore) -> Result<()> {
        let Some(group) = &self.0 else { return Ok(()) };
        let weights = vs.trainable_variables();
        let weights =
            Tensor::cat(&weights.iter().map(|w| w.detach().flatten(0, -1)).collect::<Vec<_>>(), 0);
        let all = group.all_gather(&weights)?;
        ensure!(all.iter().all(|other| *other == weights), "the ranks have different weights");
        Ok(())
    }
}

/// Averages gradients, unless one process trains alone.
#[derive(Debug)]
pub struct Gradients(Option<DistributedDataParallel>);

impl Gradients {
    /// Runs a forward pass.
    pub fn forward<T>(&mut self, forward: impl FnOnce() -> T) -> Result<T> {
        match &mut self.0 {
            Some(ddp) => Ok(ddp.forward(forward)?),
            None => Ok(forward()),
        }
    }

    /// Runs the backward pass on the scaled loss.
    pub fn backward(&mut self, scaler: &mut GradScaler, loss: &Tensor) -> Result<()> {
        match &mut self.0 {
            Some(ddp) => Ok(ddp.backward_scaled(scaler, loss)?),
            None => Ok(scaler.backward(loss)?),
        }
    }
}

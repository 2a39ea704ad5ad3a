//! What takes the place of `ranks.rs` without the feature `distributed`: one process, which trains alone.

use anyhow::{Result, ensure};
use tch::nn::{self, BatchNormConfig, ModuleT, Path, VarStore};
use tch::{Device, Tensor};
use tch_amp::GradScaler;
use tch_amp::checkpoint::{Checkpoint, Restore};
use tch_amp::optim::Optimizer;

/// This process.
#[derive(Debug)]
pub struct Ranks;

impl Ranks {
    /// This process.
    pub fn alone() -> Self {
        Self
    }

    /// Fails if several ranks are wanted.
    pub fn start(ranks: Option<usize>) -> Result<Option<Self>> {
        let missing =
            "--ranks needs the feature `distributed`, without which this program was built";
        ensure!(ranks.is_none(), missing);
        Ok(Some(Self::alone()))
    }

    /// Whether this process writes the report.
    pub fn is_first(&self) -> bool {
        true
    }

    /// The number of this process.
    pub fn rank(&self) -> usize {
        0
    }

    /// One.
    pub fn size(&self) -> usize {
        1
    }

    /// Returns the device that is wanted.
    pub fn device(&self, wanted: Device) -> Result<Device> {
        Ok(wanted)
    }

    /// Returns the batch.
    pub fn share(&self, batch: &Tensor) -> Tensor {
        batch.shallow_clone()
    }

    /// Returns the rows.
    pub fn gather(&self, rows: &Tensor) -> Result<Tensor> {
        Ok(rows.shallow_clone())
    }

    /// Returns the loss.
    pub fn mean(&self, loss: &Tensor) -> Result<f64> {
        Ok(loss.double_value(&[]))
    }

    /// Returns the decision.
    pub fn any(&self, decision: bool) -> Result<bool> {
        Ok(decision)
    }

    /// Runs `work`.
    pub fn on_first<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<Option<T>> {
        work().map(Some)
    }

    /// Seeds the random numbers.
    pub fn manual_seed(&self, seed: i64) {
        tch::manual_seed(seed);
    }

    /// Loads a checkpoint.
    pub fn load_on_first(
        &self,
        load: impl FnOnce() -> tch_amp::Result<Option<Checkpoint>>,
    ) -> Result<Option<Checkpoint>> {
        Ok(load()?)
    }

    /// Adds the state of the random numbers.
    pub fn add_rngs(&self, to: &mut Checkpoint, name: &str, device: Device) -> Result<()> {
        to.add_rng(name, device)?;
        Ok(())
    }

    /// Restores what [`add_rngs`](Self::add_rngs) has added.
    pub fn rngs<'a>(&'a self, restore: Restore<'a>, name: &str, device: Device) -> Restore<'a> {
        restore.rng(name, device)
    }

    /// Has nobody to divide the state with.
    pub fn shard(&self, _: &mut Optimizer) -> Result<()> {
        Ok(())
    }

    /// Returns what runs the passes.
    pub fn gradients(&self, _: &VarStore) -> Result<Gradients> {
        Ok(Gradients)
    }

    /// Makes a layer of batch normalization.
    pub fn batch_norm2d(
        &self,
        path: Path<'_>,
        channels: i64,
        config: BatchNormConfig,
        _: bool,
    ) -> Box<dyn ModuleT> {
        Box::new(nn::batch_norm2d(path, channels, config))
    }

    /// Has nobody to give the buffers to.
    pub fn same_buffers(&self, _: &VarStore) -> Result<()> {
        Ok(())
    }

    /// Has nothing to compare.
    pub fn check_weights(&self, _: &VarStore) -> Result<()> {
        Ok(())
    }
}

/// Runs the passes of a process that trains alone.
#[derive(Debug)]
pub struct Gradients;

impl Gradients {
    /// Runs a forward pass.
    pub fn forward<T>(&mut self, forward: impl FnOnce() -> T) -> Result<T> {
        Ok(forward())
    }

    /// Runs the backward pass on the scaled loss.
    pub fn backward(&mut self, scaler: &mut GradScaler, loss: &Tensor) -> Result<()> {
        Ok(scaler.backward(loss)?)
    }

    /// Runs the forward and the backward pass of a micro-batch, whose loss is weighted by its share of the step.
    pub fn micro_batch(
        &mut self,
        _: bool,
        scaler: &mut GradScaler,
        loss: impl FnOnce() -> Result<Tensor>,
    ) -> Result<()> {
        Ok(scaler.backward(&loss()?)?)
    }
}

//! What takes the place of `ranks.rs` without the feature `distributed`: one process, which trains alone.

use anyhow::{Result, ensure};
use tch::Tensor;
use tch::nn::VarStore;
use tch_amp::GradScaler;

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

    /// Returns the batch.
    pub fn share(&self, batch: &Tensor) -> Tensor {
        batch.shallow_clone()
    }

    /// Returns the loss.
    pub fn mean(&self, loss: &Tensor) -> Result<f64> {
        Ok(loss.double_value(&[]))
    }

    /// Returns what runs the passes.
    pub fn gradients(&self, _: &VarStore) -> Result<Gradients> {
        Ok(Gradients)
    }

    /// Has nothing to say.
    pub fn sentence(&self, _: i64) -> Option<String> {
        None
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
}

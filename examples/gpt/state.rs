//! What a checkpoint contains: everything that the next step depends on.

use super::train::Trainer;
use crate::recipe::log::{self, Row};
use anyhow::Result;
use tch::Device;
use tch_amp::checkpoint::Checkpoint;

/// The random numbers of the CPU, and of the GPU if the model is there, of each rank.
const RNG: &str = "rng";
const GPU_RNG: &str = "gpu_rng";

impl Trainer<'_> {
    /// The state after a step, which all ranks make together. That of the first rank is complete.
    pub fn checkpoint(&mut self, rows: &[Row]) -> Result<Checkpoint> {
        let mut checkpoint = Checkpoint::new();
        checkpoint.add_model("model", &self.vs)?;
        checkpoint.add_optimizer("optimizer", &mut self.optimizer)?;
        checkpoint.add_scaler("scaler", &self.scaler)?;
        checkpoint.add("schedule", &mut self.schedule)?;
        checkpoint.add("ema", &mut self.ema)?;
        self.ranks.add_rngs(&mut checkpoint, RNG, Device::Cpu)?;
        if self.device.is_cuda() {
            self.ranks.add_rngs(&mut checkpoint, GPU_RNG, self.device)?;
        }
        checkpoint.add_value("position", &self.reader.position)?;
        log::save(rows, &mut checkpoint)?;
        Ok(checkpoint)
    }

    /// Takes over the state of a checkpoint, and returns its lines of the log.
    pub fn restore(&mut self, checkpoint: &Checkpoint) -> Result<Vec<Row>> {
        let position = checkpoint.value("position")?;
        let rows = log::load(checkpoint)?;
        let restore = checkpoint
            .restore()
            .model("model", &self.vs)
            .optimizer("optimizer", &mut self.optimizer)
            .scaler("scaler", &mut self.scaler)
            .add("schedule", &mut self.schedule)
            .add("ema", &mut self.ema);
        let restore = self.ranks.rngs(restore, RNG, Device::Cpu);
        // A run that goes on on another kind of device has other random numbers there in any case.
        let has_gpu = self.device.is_cuda() && checkpoint.contains(GPU_RNG);
        let restore =
            if has_gpu { self.ranks.rngs(restore, GPU_RNG, self.device) } else { restore };
        restore.apply()?;
        self.reader.position = position;
        Ok(rows)
    }
}

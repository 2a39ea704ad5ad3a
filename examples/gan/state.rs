//! What a checkpoint contains: everything that the next step depends on.

use super::train::Trainer;
use crate::recipe::log::{self, Row};
use anyhow::Result;
use tch::Device;
use tch_amp::checkpoint::Checkpoint;
use tch_amp::scaler::StepCounter;

/// The random numbers of the CPU, and of the GPU if the networks are there.
const RNG: &str = "rng";
const GPU_RNG: &str = "gpu_rng";

impl Trainer {
    /// The state after a step.
    pub fn checkpoint(&mut self, rows: &[Row]) -> Result<Checkpoint> {
        let mut checkpoint = Checkpoint::new();
        checkpoint.add_model("generator", &self.generator.vs)?;
        checkpoint.add_model("discriminator", &self.discriminator.vs)?;
        checkpoint.add_optimizer("generator_optimizer", &mut self.generator.optimizer)?;
        checkpoint.add_optimizer("discriminator_optimizer", &mut self.discriminator.optimizer)?;
        checkpoint.add_scalers("generator_scalers", &self.scalers)?;
        checkpoint.add_scaler("discriminator_scaler", &self.scaler)?;
        checkpoint.add_rng(RNG, Device::Cpu)?;
        if self.device.is_cuda() {
            checkpoint.add_rng(GPU_RNG, self.device)?;
        }
        checkpoint.add_value("taken", &self.taken()?)?;
        log::save(rows, &mut checkpoint)?;
        Ok(checkpoint)
    }

    /// Takes over the state of a checkpoint, and returns its lines of the log.
    pub fn restore(&mut self, checkpoint: &Checkpoint) -> Result<Vec<Row>> {
        let (taken, rows) = (checkpoint.value("taken")?, log::load(checkpoint)?);
        let restore = checkpoint
            .restore()
            .model("generator", &self.generator.vs)
            .model("discriminator", &self.discriminator.vs)
            .optimizer("generator_optimizer", &mut self.generator.optimizer)
            .optimizer("discriminator_optimizer", &mut self.discriminator.optimizer)
            .scalers("generator_scalers", &mut self.scalers)
            .scaler("discriminator_scaler", &mut self.scaler)
            .rng(RNG, Device::Cpu);
        // A run that goes on on another kind of device has other random numbers there in any case.
        let has_gpu = self.device.is_cuda() && checkpoint.contains(GPU_RNG);
        let restore = if has_gpu { restore.rng(GPU_RNG, self.device) } else { restore };
        restore.apply()?;
        self.taken = StepCounter::starting_at(taken);
        Ok(rows)
    }
}

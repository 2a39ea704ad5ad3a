//! What a checkpoint contains: everything that the next step depends on. The random numbers of libtorch are not among
//! it, because only the first weights are drawn from them.

use super::train::Trainer;
use crate::recipe::log::{self, Row};
use anyhow::Result;
use tch_amp::checkpoint::Checkpoint;

/// What a resumed run has of its earlier parts.
pub struct Earlier {
    /// The lines of the log.
    pub rows: Vec<Row>,
    /// How long the training took.
    pub seconds: f64,
}

impl Trainer<'_> {
    /// The state after a step, which all ranks make together. That of the first rank is complete, and its statistics of
    /// batch normalization are those with which all ranks go on.
    pub fn checkpoint(&mut self, rows: &[Row], seconds: f64) -> Result<Checkpoint> {
        let mut checkpoint = Checkpoint::new();
        checkpoint.add_model("model", &self.vs)?;
        checkpoint.add_optimizer("optimizer", &mut self.optimizer)?;
        checkpoint.add_scaler("scaler", &self.scaler)?;
        checkpoint.add("schedule", &mut self.schedule)?;
        checkpoint.add("swa", &mut self.swa)?;
        checkpoint.add_value("position", &self.reader.position)?;
        log::save(rows, &mut checkpoint)?;
        checkpoint.add_value("seconds", &seconds)?;
        Ok(checkpoint)
    }

    /// Takes over the state of a checkpoint.
    pub fn restore(&mut self, checkpoint: &Checkpoint) -> Result<Earlier> {
        let position = checkpoint.value("position")?;
        let rows = log::load(checkpoint)?;
        let seconds = checkpoint.value("seconds")?;
        checkpoint
            .restore()
            .model("model", &self.vs)
            .optimizer("optimizer", &mut self.optimizer)
            .scaler("scaler", &mut self.scaler)
            .add("schedule", &mut self.schedule)
            .add("swa", &mut self.swa)
            .apply()?;
        self.reader.position = position;
        Ok(Earlier { rows, seconds })
    }
}

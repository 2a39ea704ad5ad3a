//! Saves a run after every epoch, and resumes it.

use super::options::Options;
use super::train::{Step, Trainer};
use crate::recipe::{Precision, tell};
use anyhow::{Context, Result, ensure};
use tch::Device;
use tch_amp::checkpoint::{Checkpoint, CheckpointFolder};

/// The folder that a run is saved to, if there is one.
#[derive(Debug)]
pub struct Saves {
    folder: Option<CheckpointFolder>,
    seed: i64,
    /// Whether this is the rank that saves. All ranks resume.
    is_first: bool,
}

impl Saves {
    /// Opens the run's folder. Unless the run is to be resumed, the first rank removes what the same run has saved there,
    /// and refuses the checkpoints of any other one.
    pub fn open(options: &Options, precision: Precision, is_first: bool) -> Result<Self> {
        let open = |path: &std::path::PathBuf| CheckpointFolder::new(path.join(precision.name()));
        let is_used = is_first || options.resume;
        let folder = options.checkpoints.as_ref().filter(|_| is_used).map(open).transpose()?;
        let folder = folder.map(|folder| folder.keep_last(1));
        if let (Some(folder), false) = (&folder, options.resume) {
            let files = folder.files()?;
            files.iter().try_for_each(|file| ensure_same(&file.path, options.seed))?;
            for file in files {
                std::fs::remove_file(&file.path)
                    .with_context(|| format!("cannot remove {}", file.path.display()))?;
            }
        }
        Ok(Self { folder, seed: options.seed, is_first })
    }

    /// Saves everything that the next epoch depends on, and the steps so far for the report.
    pub fn save<M>(
        &self,
        epoch: usize,
        trainer: &mut Trainer<'_, M>,
        steps: &[Step],
    ) -> Result<()> {
        let Some(folder) = self.folder.as_ref().filter(|_| self.is_first) else { return Ok(()) };
        let mut checkpoint = Checkpoint::new();
        checkpoint.add_model("model", &trainer.vs)?;
        checkpoint.add_optimizer("optimizer", &mut trainer.optimizer)?;
        checkpoint.add_scaler("scaler", &trainer.scaler)?;
        // The batches are shuffled on the CPU.
        checkpoint.add_rng("rng", Device::Cpu)?;
        checkpoint.add_value("steps", &steps)?;
        checkpoint.add_value("seed", &self.seed)?;
        folder.save(epoch as u64, &checkpoint)?;
        Ok(())
    }

    /// Restores the newest checkpoint, if there is one, and returns the number of finished epochs and their steps.
    pub fn resume<M>(&self, trainer: &mut Trainer<'_, M>) -> Result<(usize, Vec<Step>)> {
        let Some(found) = self.folder.as_ref().map_or(Ok(None), CheckpointFolder::latest)? else {
            return Ok((0, Vec::new()));
        };
        for damaged in &found.damaged {
            tell(format_args!("{damaged}. The run goes on from an older checkpoint instead."));
        }
        let seed: i64 = found.checkpoint.value("seed")?;
        ensure!(
            seed == self.seed,
            "{} was trained with --seed {seed}: use that seed, or start a new run without --resume",
            found.file.path.display()
        );
        found
            .checkpoint
            .restore()
            .model("model", &trainer.vs)
            .optimizer("optimizer", &mut trainer.optimizer)
            .scaler("scaler", &mut trainer.scaler)
            .rng("rng", Device::Cpu)
            .apply()?;
        Ok((usize::try_from(found.file.step)?, found.checkpoint.value("steps")?))
    }
}

/// Fails unless a checkpoint is of a run of the demo with this seed, which has the same numbers when it begins again.
fn ensure_same(path: &std::path::Path, seed: i64) -> Result<()> {
    let found = Checkpoint::load(path).and_then(|checkpoint| checkpoint.value::<i64>("seed"));
    let is_same = found.is_ok_and(|found| found == seed);
    ensure!(
        is_same,
        "{} is of another run: remove it, or use another folder of --checkpoints",
        path.display()
    );
    Ok(())
}

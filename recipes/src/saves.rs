//! The folder with the checkpoints of a run.

use super::{Options, Ranks, tell, writable};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};
use tch_amp::Error;
use tch_amp::checkpoint::{Checkpoint, CheckpointError, CheckpointFolder, PendingSave};

/// The parts of each checkpoint that say of which run and of which step it is.
const RUN: &str = "run";
const STEP: &str = "step";

/// Where a run saves its checkpoints, if it saves any. The newest two are kept. A thread writes them while the training
/// goes on.
#[derive(Debug)]
pub struct Saves<'a> {
    folder: Option<CheckpointFolder>,
    pending: Option<PendingSave>,
    /// For how long each save has stopped the training.
    stops: Vec<Duration>,
    ranks: &'a Ranks,
    /// The options of the run that its losses depend on, in words.
    run: String,
    options: &'a Options,
}

impl<'a> Saves<'a> {
    /// Opens the folder of `--checkpoints`, on all ranks. `run` are the options on which the losses depend, such as
    /// `--seed 0`: [`resume`](Self::resume) refuses a checkpoint of other ones.
    ///
    /// Fails if nothing can be saved to it, and, without `--resume`, if it has checkpoints: those of a finished run are
    /// its results. They are removed only if they are of the same run, and the options want that.
    pub fn open(options: &'a Options, run: &str, ranks: &'a Ranks) -> Result<Self> {
        let folder = ranks.on_first(|| {
            let open = |path: &Path| {
                let folder = CheckpointFolder::new(path).context("--checkpoints")?.keep_last(2);
                writable::check_folder(path).context("--checkpoints")?;
                if options.replaces && !options.resume {
                    clear(&folder, run)?;
                } else if !options.resume {
                    ensure_empty(&folder)?;
                }
                Ok(folder)
            };
            options.checkpoints.as_deref().map(open).transpose()
        })?;
        let folder = folder.flatten();
        let (pending, stops, run) = (None, Vec::new(), run.to_owned());
        Ok(Self { folder, pending, stops, ranks, run, options })
    }

    /// Saves a checkpoint after this step. All ranks call this with what they have; the first one saves its checkpoint.
    /// Copies it, and leaves the rest to a thread; waits for the save before if it still runs, and fails if that has
    /// failed. Does nothing if the run saves none.
    pub fn save(&mut self, step: u64, mut checkpoint: Checkpoint) -> Result<()> {
        let Self { folder, pending, stops, ranks, run, options } = self;
        ranks.on_first(|| {
            let Some(folder) = folder else { return Ok(()) };
            let since = Instant::now();
            checkpoint.add_value(RUN, &(run.as_str(), options.steps))?;
            checkpoint.add_value(STEP, &step)?;
            ended(pending.take())?;
            *pending = Some(folder.save_async(step, &checkpoint)?);
            stops.push(since.elapsed());
            Ok(())
        })?;
        Ok(())
    }

    /// Waits until all checkpoints are saved. All ranks call this.
    pub fn finish(&mut self) -> Result<()> {
        let Self { pending, ranks, .. } = self;
        ranks.on_first(|| ended(pending.take()))?;
        Ok(())
    }

    /// Says for how long the saves have stopped the training; `None` if this rank has saved nothing.
    pub fn cost(&self) -> Option<String> {
        let (first, others) = self.stops.split_first()?;
        let all: Duration = self.stops.iter().sum();
        let ms = |stop: &Duration| format!("{:.1} ms", 1e3 * stop.as_secs_f64());
        let Some(longest) = others.iter().max() else {
            return Some(format!("A checkpoint has stopped the training for {}.", ms(first)));
        };
        Some(format!(
            "{} checkpoints have stopped the training for {}: the first for {}, later ones for at most {} each.",
            self.stops.len(),
            ms(&all),
            ms(first),
            ms(longest),
        ))
    }

    /// Returns the newest checkpoint and its step, on all ranks, if the run is to be resumed and there is one.
    pub fn resume(&self) -> Result<Option<(u64, Checkpoint)>> {
        let Some(checkpoint) = self.options.newest(self.ranks)? else { return Ok(None) };
        let (run, _): (String, u64) = checkpoint.value(RUN)?;
        ensure!(
            run == self.run,
            "the checkpoint is of a run with {run}, and this run has {}: use the same options, or begin a new run with \
             another folder of --checkpoints",
            self.run
        );
        let step = checkpoint.value(STEP)?;
        let Options { steps, length, .. } = self.options;
        ensure!(step <= *steps, "{step} steps are done: ask for more with {length}");
        Ok(Some((step, checkpoint)))
    }

    /// Says how to go on with a run that was interrupted after this step.
    pub fn how_to_resume(&self, step: u64) -> String {
        match self.folder {
            Some(_) => format!(
                "Interrupted after step {step}, and saved. The same command with --resume goes on from there."
            ),
            None => format!("Interrupted after step {step}. Nothing was saved."),
        }
    }
}

/// Waits for a save.
fn ended(pending: Option<PendingSave>) -> Result<()> {
    match pending.map(PendingSave::wait).transpose() {
        // It is saved, and only older ones are left.
        Err(Error::Checkpoint(left @ CheckpointError::NotRemoved { .. })) => tell(left),
        saved => drop(saved?),
    }
    Ok(())
}

/// Fails if the folder has checkpoints.
fn ensure_empty(folder: &CheckpointFolder) -> Result<()> {
    let newest = folder.files()?.pop().map(|file| file.path.display().to_string());
    ensure!(
        newest.is_none(),
        "{} is of an earlier run: go on with it by --resume, which tests a finished run again, or remove it, or use \
         another folder of --checkpoints",
        newest.unwrap_or_default()
    );
    Ok(())
}

/// Removes the checkpoints of the same run, which has the same numbers when it begins again. Fails if there are others.
fn clear(folder: &CheckpointFolder, run: &str) -> Result<()> {
    let files = folder.files()?;
    for file in &files {
        let found = Checkpoint::load(&file.path)
            .and_then(|checkpoint| checkpoint.value::<(String, u64)>(RUN));
        ensure!(
            found.is_ok_and(|(found, _)| found == run),
            "{} is of another run: remove it, or use another folder of --checkpoints",
            file.path.display()
        );
    }
    for file in files {
        fs::remove_file(&file.path)
            .with_context(|| format!("cannot remove {}", file.path.display()))?;
    }
    Ok(())
}

//! The loop of every recipe.

use super::log::{self, Log};
use super::measure::Number;
use super::{Ended, Interrupt, Options, Progress, Ranks, Saves};
use crate::interrupt::NothingToSave;
use anyhow::Result;
use std::time::Instant;
use tch::nn::VarStore;
use tch_amp::checkpoint::Checkpoint;

/// A model with everything that trains it. All ranks call the methods together.
pub trait Training {
    /// What a step has measured, on the device.
    type Measured;

    /// The columns of the log, and the names in TensorBoard.
    const COLUMNS: &'static [&'static str];

    /// Takes a step. Nothing synchronizes.
    fn step(&mut self) -> Result<Self::Measured>;

    /// Returns the numbers of a step for the log, and so waits for the device. `since` is when the steps since the last
    /// line of the log began.
    fn read(&mut self, measured: &Self::Measured, since: Instant) -> Result<Vec<Number>>;

    /// Evaluates the weights after a step, and returns the numbers for the log.
    fn evaluate(&mut self, _step: u64) -> Result<Vec<Number>> {
        Ok(Vec::new())
    }

    /// Shows the numbers of a step with the progress.
    fn words(&self, numbers: &[Number]) -> String;

    /// Adds everything that the next step depends on. The checkpoint of the first rank is complete.
    fn save(&mut self, checkpoint: &mut Checkpoint) -> Result<()>;

    /// Takes over what [`save`](Self::save) has added.
    fn restore(&mut self, checkpoint: &Checkpoint) -> Result<()>;

    /// Returns how many steps were taken, which excludes those that were skipped because of non-finite gradients.
    fn taken(&mut self) -> Result<u64>;

    /// The weights, which must be the same on all ranks.
    fn weights(&self) -> &VarStore;
}

/// How long a run is, and what it does after how many steps.
#[derive(Clone, Debug)]
pub struct Plan<'a> {
    /// The common options of the recipe.
    pub options: &'a Options,
    /// The options on which the numbers depend, in words: a resumed run must have the same.
    pub of_run: String,
    /// Steps from one line of the log to the next.
    pub log_every: u64,
    /// Steps from one evaluation to the next.
    pub eval_every: u64,
    /// Steps from one checkpoint to the next.
    pub save_every: u64,
}

/// The part of a checkpoint with the seconds of training so far.
const SECONDS: &str = "seconds";

/// What the loop has left. Until it is dropped, Ctrl-C ends the program at once, as all is saved.
#[derive(Debug)]
pub struct Trained<'a> {
    /// Whether it has done all of its steps.
    pub ended: Ended,
    /// The numbers of all steps, also of those before it was resumed.
    pub log: Log,
    /// How many steps were skipped because the gradients were not finite.
    pub skipped: u64,
    /// How long the training took without evaluations, also before it was resumed.
    pub seconds: f64,
    _saved: NothingToSave<'a>,
}

/// Trains from the first step, or from the newest checkpoint, until all steps are done or the run is interrupted.
pub fn train<'a, T: Training>(
    trainer: &mut T,
    plan: &Plan<'_>,
    ranks: &Ranks,
    interrupt: &'a Interrupt,
    progress: &Progress,
) -> Result<Trained<'a>> {
    let Plan { options, log_every, eval_every, save_every, .. } = *plan;
    // Only now that there is a trainer: a run whose options do not fit leaves no folder.
    let saves = Saves::open(options, &plan.of_run, ranks)?;
    let (mut done, mut rows, mut seconds) = (0, Vec::new(), 0.0);
    if let Some((step, checkpoint)) = saves.resume()? {
        (done, rows) = (step, log::load(&checkpoint)?);
        if checkpoint.contains(SECONDS) {
            seconds = checkpoint.value(SECONDS)?;
        }
        trainer.restore(&checkpoint)?;
    }
    progress.resumed(done);
    let folder = options.logs.as_deref().filter(|_| ranks.is_first());
    let mut log = Log::start(folder, T::COLUMNS, rows, done)?;

    let steps = options.steps;
    let (mut ended, mut last) = (Ended::Finished, steps);
    let mut started = Instant::now();
    for step in done + 1..=steps {
        let measured = trainer.step()?;
        let is_last = step == steps;
        let is_due = |every: u64| step.is_multiple_of(every) || is_last;
        let mut message = None;
        if is_due(log_every) || is_due(eval_every) || step == 1 {
            let mut numbers = trainer.read(&measured, started)?;
            seconds += started.elapsed().as_secs_f64();
            if is_due(eval_every) {
                numbers.extend(trainer.evaluate(step)?);
            }
            log.write(step, &numbers)?;
            message = Some(trainer.words(&numbers));
            started = Instant::now();
        }
        progress.step(step, message);
        let stops = ranks.any(interrupt.is_requested())? && !is_last;
        if is_due(save_every) || stops {
            let mut checkpoint = Checkpoint::new();
            trainer.save(&mut checkpoint)?;
            log::save(log.rows(), &mut checkpoint)?;
            checkpoint.add_value(SECONDS, &(seconds + started.elapsed().as_secs_f64()))?;
            saves.save(step, checkpoint)?;
        }
        if stops {
            progress.say(&saves.how_to_resume(step));
            (ended, last) = (Ended::Interrupted { step }, step);
            break;
        }
    }
    let saved = interrupt.nothing_to_save();
    if ended == Ended::Finished && ranks.any(interrupt.is_requested())? {
        progress.say(&saves.how_to_resume(steps));
        ended = Ended::Interrupted { step: steps };
    }
    ranks.check_weights(trainer.weights())?;
    let skipped = last.saturating_sub(trainer.taken()?);
    Ok(Trained { ended, log, skipped, seconds, _saved: saved })
}

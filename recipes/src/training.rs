//! The loop of every recipe.

use super::log::{self, Log};
use super::measure::{Measured, Number};
use super::options::AMP;
use super::{Ended, Interrupt, Options, Progress, Ranks, Saves};
use crate::interrupt::NothingToSave;
use anyhow::Result;
use std::time::Instant;
use tch::nn::VarStore;
use tch_amp::checkpoint::Checkpoint;
use tch_amp::insight::{Budget, BudgetReport};
use tch_amp::optim::Optimizer;
use tch_amp::{Autocast, Error, GradScaler};

/// A model with everything that trains it. All ranks call the methods together.
pub trait Training {
    /// What a step has measured, on the device.
    type Measured;

    /// The columns of the log, and the names in TensorBoard.
    const COLUMNS: &'static [&'static str];

    /// Measures in which dtype each operator is fastest, if that is wanted and not known, and says so in a line.
    fn tune(&mut self) -> Result<Option<String>> {
        Ok(None)
    }

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

/// Tests that a step in half precision differs from one in f32 by rounding alone. `exchange` prepares the same step
/// again, and exchanges the optimizer and the scaler of the trainer for others; it is called before the step and after.
pub fn budget<T: Training<Measured = Measured>>(
    trainer: &mut T,
    vs: &VarStore,
    region: Autocast,
    optimizer: impl FnMut() -> tch_amp::Result<Optimizer>,
    exchange: impl Fn(&mut T, &mut Optimizer, &mut GradScaler),
) -> Result<BudgetReport> {
    let report = Budget::new(vs, region).measure(optimizer, |run, optimizer| {
        exchange(trainer, optimizer, run.scaler());
        let measured = trainer.step();
        exchange(trainer, optimizer, run.scaler());
        let torch = |error: anyhow::Error| Error::Torch(error.to_string());
        measured.map(|measured| measured.loss).map_err(|e| e.downcast().unwrap_or_else(torch))
    });
    Ok(report?)
}

/// A run that a trainer is to do.
#[derive(Clone, Debug)]
pub struct Plan<'a> {
    /// The common options of the recipe.
    pub options: &'a Options,
    /// The options on which the numbers depend, in words: a resumed run must have the same.
    pub of_run: String,
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
    let mut run = Run::start(trainer, plan, ranks, progress)?;
    let (mut ended, steps) = (Ended::Finished, plan.options.steps);
    for step in run.done + 1..=steps {
        run.step(step)?;
        let stops = ranks.any(interrupt.is_requested())? && step != steps;
        if stops || run.is_due(plan.options.save_every) {
            run.save()?;
        }
        if stops {
            ended = Ended::Interrupted { step };
            break;
        }
    }
    run.saves.finish()?;
    let saved = interrupt.nothing_to_save();
    if ended == Ended::Finished && ranks.any(interrupt.is_requested())? {
        ended = Ended::Interrupted { step: steps };
    }
    if let Some(cost) = run.saves.cost() {
        progress.say(&cost);
    }
    if ended != Ended::Finished {
        progress.say(&run.saves.how_to_resume(run.done));
    }
    ranks.check_weights(run.trainer.weights())?;
    let skipped = run.done.saturating_sub(run.trainer.taken()?);
    Ok(Trained { ended, log: run.log, skipped, seconds: run.seconds, _saved: saved })
}

/// A run in progress.
struct Run<'a, T> {
    trainer: &'a mut T,
    options: &'a Options,
    progress: &'a Progress,
    saves: Saves<'a>,
    log: Log,
    /// How many steps are done.
    done: u64,
    /// The time of the steps before the last line of the log, and when those after it began.
    seconds: f64,
    since: Instant,
}

impl<'a, T: Training> Run<'a, T> {
    /// Takes over the newest checkpoint, if the run is to be resumed and there is one.
    fn start(
        trainer: &'a mut T,
        plan: &'a Plan<'_>,
        ranks: &'a Ranks,
        progress: &'a Progress,
    ) -> Result<Self> {
        let options = plan.options;
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
        if let Some(line) = trainer.tune()? {
            progress.say(&line);
        }
        progress.resumed(done);
        let folder = options.logs.as_deref().filter(|_| ranks.is_first());
        let log = Log::start(folder, T::COLUMNS, rows, done)?;
        Ok(Self { trainer, options, progress, saves, log, done, seconds, since: Instant::now() })
    }

    /// Takes a step, and logs and evaluates if it is time for that.
    fn step(&mut self, step: u64) -> Result<()> {
        let measured = self.trainer.step()?;
        self.done = step;
        let evaluates = self.is_due(self.options.eval_every);
        let mut message = None;
        if evaluates || self.is_due(self.options.log_every) || step == 1 {
            let mut numbers = self.trainer.read(&measured, self.since)?;
            self.seconds += self.since.elapsed().as_secs_f64();
            if evaluates {
                numbers.extend(self.trainer.evaluate(step)?);
            }
            self.log.write(step, &numbers)?;
            message = Some(self.trainer.words(&numbers));
            self.since = Instant::now();
        }
        self.progress.step(step, message);
        Ok(())
    }

    /// Whether something that is done every few steps is due after this step. All of it is due after the last one.
    fn is_due(&self, every: u64) -> bool {
        self.done.is_multiple_of(every) || self.done == self.options.steps
    }

    fn save(&mut self) -> Result<()> {
        let mut checkpoint = Checkpoint::new();
        // With it, a run whose precision was chosen by its speed keeps it.
        let precision = self.options.amp.on(self.trainer.weights().device())?;
        checkpoint.add(AMP, &precision)?;
        self.trainer.save(&mut checkpoint)?;
        log::save(self.log.rows(), &mut checkpoint)?;
        let seconds = self.seconds + self.since.elapsed().as_secs_f64();
        checkpoint.add_value(SECONDS, &seconds)?;
        self.saves.save(self.done, checkpoint)
    }
}

//! The recipe `gpt`: the program and its loop. `main.rs`, `tests/examples.rs` and `tests/recipe` run it.

pub mod data;
pub mod measure;
pub mod model;
pub mod options;
pub mod reader;
pub mod report;
pub mod state;
pub mod train;

use crate::recipe::{self, Ended, Interrupt, Log, Precision, Progress, Ranks, Saves};
use anyhow::Result;
use data::Text;
use options::Options;
use std::time::Instant;
use tch::Device;
use tch_amp::memory::keep_freed_memory;
use train::Trainer;

/// What a run has left.
#[derive(Debug)]
pub struct Run {
    /// Whether it has done all of its steps.
    pub ended: Ended,
    /// The numbers of all steps, also of those before it was resumed.
    pub log: Log,
    /// How many steps were skipped because the gradients were not finite.
    pub skipped: u64,
    /// What the averaged weights have written; empty on ranks other than the first.
    pub sample: String,
}

/// Runs the program with these arguments.
pub fn main(args: impl IntoIterator<Item = String>) -> Result<Ended> {
    let Some(options) = Options::parse(args)? else { return Ok(Ended::Finished) };
    let Some(ranks) = Ranks::start(options.common.ranks)? else { return Ok(Ended::Finished) };
    let interrupt = Interrupt::catch()?;
    options.common.check_out(&ranks)?;
    let text = match &options.text {
        Some(path) => Text::read(path)?,
        None => Text::load()?,
    };
    let progress = if ranks.is_first() {
        let name = format!("GPT {}", options.common.amp.name());
        Progress::new(&name, options.common.steps, options.log_every)?
    } else {
        Progress::silent()
    };
    progress.say(&format!("The text: {}", text.origin));
    let device = ranks.device(options.common.device()?)?;
    // Each step takes the same memory again.
    keep_freed_memory();
    let run = train(&options, &text, device, &ranks, &interrupt, &progress)?;
    progress.finish();
    if ranks.is_first() && run.ended == Ended::Finished {
        report::write(&options, &run, &text.origin, device, &ranks)?;
    }
    Ok(run.ended)
}

/// Trains from the first step, or from the newest checkpoint, until all steps are done or the run is interrupted.
pub fn train(
    options: &Options,
    text: &Text,
    device: Device,
    ranks: &Ranks,
    interrupt: &Interrupt,
    progress: &Progress,
) -> Result<Run> {
    let mut trainer = Trainer::new(options, text, device, ranks)?;
    // Only now, because it may remove the checkpoints of the run before.
    let saves = Saves::open(&options.common, &options.of_run(text), ranks)?;
    let (done, rows) = match saves.resume()? {
        Some((step, checkpoint)) => (step, trainer.restore(&checkpoint)?),
        None => (0, Vec::new()),
    };
    progress.resumed(done);
    let folder = options.common.logs.as_deref().filter(|_| ranks.is_first());
    let mut log = Log::start(folder, &measure::COLUMNS, rows, done)?;

    let steps = options.common.steps;
    let (mut ended, mut last) = (Ended::Finished, steps);
    let mut started = Instant::now();
    for step in done + 1..=steps {
        let lr = trainer.lr()?;
        let measured = trainer.step()?;
        let is_last = step == steps;
        let is_due = |every: u64| step.is_multiple_of(every) || is_last;
        let evaluates = is_due(options.eval_every);
        let mut message = None;
        if is_due(options.log_every) || evaluates || step == 1 {
            // Reading the numbers waits for the device.
            let mut numbers = trainer.read(&measured, lr, started)?;
            if evaluates {
                numbers.push((measure::HELD_OUT, trainer.evaluate()?));
            }
            log.write(step, &numbers)?;
            message = Some(measure::words(&numbers));
            started = Instant::now();
        }
        progress.step(step, message);
        let stops = ranks.any(interrupt.is_requested())? && !is_last;
        if is_due(options.save_every) || stops {
            saves.save(step, trainer.checkpoint(log.rows())?)?;
        }
        if stops {
            progress.say(&saves.how_to_resume(step));
            (ended, last) = (Ended::Interrupted { step }, step);
            break;
        }
    }
    let _saved = interrupt.nothing_to_save();
    if ended == Ended::Finished && ranks.any(interrupt.is_requested())? {
        progress.say(&saves.how_to_resume(steps));
        ended = Ended::Interrupted { step: steps };
    }
    ranks.check_weights(trainer.weights())?;
    let writes = ended == Ended::Finished && ranks.is_first();
    let sample = if writes { trainer.write(options.sample)? } else { String::new() };
    Ok(Run { ended, log, skipped: last.saturating_sub(trainer.taken()), sample })
}

/// A very small model, which writes no files: for tests.
pub fn small(amp: Precision, steps: u64) -> Result<(Options, Text)> {
    let common = recipe::Options { amp, ..recipe::Options::silent("gpt", steps) };
    let options = Options { width: 64, layers: 1, length: 16, rows: 2, ..Options::new(common) };
    let options = Options { log_every: 1, sample: 4, recompute: true, ..options };
    let line = "    pub fn learn(&mut self, text: &[u8]) -> Result<()> { self.read(text) }\n";
    Ok((options, Text::new(line.repeat(200).as_bytes(), "a line, again and again".to_owned())?))
}

/// Takes a few steps of the small model in this process.
pub fn short_run(device: Device, amp: Precision, steps: u64) -> Result<Run> {
    let (options, text) = small(amp, steps)?;
    let run = run_alone(&options, &text, device, &Interrupt::never())?;
    // The report of the run can be made, too.
    report::page(&options, &run, &text.origin, device, &Ranks::alone()).to_html();
    Ok(run)
}

/// Trains in this process, without progress.
pub fn run_alone(
    options: &Options,
    text: &Text,
    device: Device,
    interrupt: &Interrupt,
) -> Result<Run> {
    train(options, text, device, &Ranks::alone(), interrupt, &Progress::silent())
}

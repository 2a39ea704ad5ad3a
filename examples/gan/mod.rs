//! The recipe `gan`: the program and its loop. `main.rs`, `tests/examples.rs` and `tests/recipe` run it.

pub mod bce;
pub mod measure;
pub mod options;
pub mod report;
pub mod ring;
pub mod state;
pub mod train;

use crate::recipe::{self, Ended, Interrupt, Log, Precision, Progress, Ranks, Saves};
use anyhow::{Result, ensure};
use options::Options;
use tch::{Device, Tensor};
use train::Trainer;

/// What a run has left.
#[derive(Debug)]
pub struct Run {
    /// Whether it has done all of its steps.
    pub ended: Ended,
    /// The numbers of all steps, also of those before it was resumed.
    pub log: Log,
    /// How many steps of the generator were skipped because its gradients were not finite.
    pub skipped: u64,
    /// Points that the generator makes, a row each.
    pub points: Tensor,
}

/// Runs the program with these arguments.
pub fn main(args: impl IntoIterator<Item = String>) -> Result<Ended> {
    let Some(options) = Options::parse(args)? else { return Ok(Ended::Finished) };
    let interrupt = Interrupt::catch()?;
    options.common.check_out(&Ranks::alone())?;
    let device = options.common.device()?;
    // Networks this small gain nothing from several threads, which lose much time to each other on a busy machine.
    tch::set_num_threads(1);
    let name = format!("GAN {}", options.common.amp.name());
    let progress = Progress::new(&name, options.common.steps, options.log_every)?;
    progress.say(&bce::plain_bce(device)?);
    let run = train(&options, device, &interrupt, &progress)?;
    progress.finish();
    if run.ended == Ended::Finished {
        report::write(&options, &run, device)?;
    }
    Ok(run.ended)
}

/// Trains from the first step, or from the newest checkpoint, until all steps are done or the run is interrupted.
pub fn train(
    options: &Options,
    device: Device,
    interrupt: &Interrupt,
    progress: &Progress,
) -> Result<Run> {
    let mut trainer = Trainer::new(options, device)?;
    let ranks = Ranks::alone();
    // Only now, because it may remove the checkpoints of the run before.
    let saves = Saves::open(&options.common, &options.of_run(), &ranks)?;
    let (done, rows) = match saves.resume()? {
        Some((step, checkpoint)) => (step, trainer.restore(&checkpoint)?),
        None => (0, Vec::new()),
    };
    progress.resumed(done);
    let mut log = Log::start(options.common.logs.as_deref(), &measure::COLUMNS, rows, done)?;

    let steps = options.common.steps;
    let (mut ended, mut last) = (Ended::Finished, steps);
    for step in done + 1..=steps {
        let losses = trainer.step()?;
        let is_last = step == steps;
        let is_due = |every: u64| step.is_multiple_of(every) || is_last;
        let mut message = None;
        if is_due(options.log_every) || step == 1 {
            // Reading the numbers waits for the device.
            let numbers = trainer.read(&losses)?;
            log.write(step, &numbers)?;
            message = Some(measure::words(&numbers));
        }
        progress.step(step, message);
        let stops = interrupt.is_requested() && !is_last;
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
    if ended == Ended::Finished && interrupt.is_requested() {
        progress.say(&saves.how_to_resume(steps));
        ended = Ended::Interrupted { step: steps };
    }
    let finite = |column| log.last(column).is_none_or(f64::is_finite);
    ensure!(
        measure::COLUMNS.into_iter().all(finite),
        "a loss is not finite: {:?}",
        log.rows().last()
    );
    let skipped = last.saturating_sub(trainer.taken()?);
    Ok(Run { ended, log, skipped, points: trainer.points()? })
}

/// Takes a few steps in this process, without files: for tests.
pub fn short_run(device: Device, amp: Precision, steps: u64) -> Result<Run> {
    let common = recipe::Options { amp, ..recipe::Options::silent("gan", steps) };
    let options = Options { log_every: 5, ..Options::new(common) };
    let run = train(&options, device, &Interrupt::never(), &Progress::silent())?;
    // The report of the run can be made, too.
    report::page(&options, &run, device).to_html();
    Ok(run)
}

//! The recipe `gan`: the program and its run.

pub mod bce;
pub mod measure;
pub mod options;
pub mod report;
pub mod ring;
pub mod train;

use crate::precision_name;
use crate::training::{self, Plan};
use crate::{Ended, Interrupt, Log, Progress, Ranks};
use anyhow::Result;
use options::Options;
use std::ffi::OsString;
use tch::{Device, Tensor};
use tch_amp::Amp;
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
pub fn main(args: impl IntoIterator<Item: Into<OsString>>) -> Result<Ended> {
    let Some(mut options) = Options::parse(args)? else { return Ok(Ended::Finished) };
    let interrupt = Interrupt::catch()?;
    options.common.check_out(&Ranks::alone())?;
    let device = options.common.device()?;
    options.common.decide(device, &Ranks::alone())?;
    // Networks this small gain nothing from several threads, which lose much time to each other on a busy machine.
    tch::set_num_threads(1);
    let name = format!("GAN {}", precision_name(options.common.amp));
    let progress = Progress::new(&name, options.common.steps, options.common.log_every)?;
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
    train_from(Trainer::new(options, device)?, options, interrupt, progress)
}

/// Like [`train()`], with networks that were made before.
pub fn train_from(
    mut trainer: Trainer,
    options: &Options,
    interrupt: &Interrupt,
    progress: &Progress,
) -> Result<Run> {
    // There is nothing to evaluate beside what is in each line of the log.
    let common = crate::Options { eval_every: options.common.log_every, ..options.common.clone() };
    let plan = Plan { options: &common, of_run: options.of_run() };
    let trained = training::train(&mut trainer, &plan, &Ranks::alone(), interrupt, progress)?;
    let (ended, skipped) = (trained.ended, trained.skipped);
    Ok(Run { ended, log: trained.log, skipped, points: trainer.points()? })
}

/// Takes a few steps in this process, without files: for tests.
pub fn short_run(device: Device, amp: Amp, steps: u64) -> Result<Run> {
    let common = crate::Options { amp, log_every: 5, ..crate::Options::silent("gan", steps) };
    let options = Options::new(common);
    let run = train(&options, device, &Interrupt::never(), &Progress::silent())?;
    // The report of the run can be made, too.
    report::page(&options, &run, device).to_html();
    Ok(run)
}

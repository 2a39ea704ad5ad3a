//! The recipe `images`: the program and its run.

pub mod batch;
pub mod data;
pub mod idx;
pub mod model;
pub mod options;
pub mod reader;
pub mod report;
pub mod test;
pub mod train;

use crate::order::mixed;
use crate::precision_name;
use crate::training::{self, Plan};
use crate::{Ended, Interrupt, Log, Progress, Ranks, Saves, Session, tell};
use anyhow::Result;
use batch::Set;
use data::{Data, Images};
use options::Options;
use std::ffi::OsString;
use tch::Device;
use tch_amp::Amp;
use test::Tested;
use train::Trainer;

/// What a run has left.
#[derive(Debug)]
pub struct Run {
    /// The precision.
    pub amp: Amp,
    /// Whether it has done all of its steps.
    pub ended: Ended,
    /// The numbers of all steps, also of those before it was resumed.
    pub log: Log,
    /// The answers in the test; `None` if it was interrupted.
    pub tested: Option<Tested>,
    /// How many steps were skipped because the gradients were not finite.
    pub skipped: u64,
    /// How long the training took without evaluations, also before it was resumed.
    pub seconds: f64,
}

/// Runs the program with these arguments.
pub fn main(args: impl IntoIterator<Item: Into<OsString>>) -> Result<Ended> {
    let Some(mut options) = Options::parse(args)? else { return Ok(Ended::Finished) };
    let Some(session) = Session::start(&mut options.common)? else { return Ok(Ended::Finished) };
    let Session { ranks, device, .. } = &session;
    options.check_ranks(ranks.size())?;
    let data = match &options.data {
        Some(folder) => Data::read(folder)?,
        None => Data::load()?,
    };
    options.check_data(&data)?;
    let set = Set::new(&data, options.moved, *device);
    let (runs, is_fp16_left_out) = options.runs(*device);
    if ranks.is_first() {
        tell(data.describe());
        if is_fp16_left_out {
            tell(
                "fp16 is left out, which is about 20 times slower than fp32 on a CPU: name it, as in --compare \
                 off,bf16,fp16, to include it.",
            );
        }
    }
    for run in &runs {
        // None of the runs begins if there is no room for the checkpoints of one of them.
        drop(Saves::open(&run.common, &run.of_run(&data), ranks)?);
    }
    let mut done = Vec::new();
    for options in &runs {
        let name = format!("ResNet {}", precision_name(options.common.amp));
        let crate::Options { steps, log_every, .. } = options.common;
        let progress = Progress::on_first(ranks, &name, steps, log_every)?;
        let run = train(options, &data, &set, &session, &progress)?;
        progress.finish();
        if run.ended != Ended::Finished {
            return Ok(run.ended);
        }
        done.push(run);
    }
    if ranks.is_first() {
        report::write(&options, &done, &data, *device, ranks)?;
    }
    Ok(Ended::Finished)
}

/// Trains from the first step, or from the newest checkpoint, until all steps are done or the run is interrupted.
pub fn train(
    options: &Options,
    data: &Data,
    set: &Set,
    session: &Session,
    progress: &Progress,
) -> Result<Run> {
    let Session { ranks, device, interrupt } = session;
    let mut trainer = Trainer::new(options, data, set, *device, ranks)?;
    let plan = Plan { options: &options.common, of_run: options.of_run(data) };
    let trained = training::train(&mut trainer, &plan, ranks, interrupt, progress)?;
    let tested = (trained.ended == Ended::Finished).then(|| trainer.test()).transpose()?;
    let (amp, ended, skipped) = (options.common.amp, trained.ended, trained.skipped);
    Ok(Run { amp, ended, log: trained.log, tested, skipped, seconds: trained.seconds })
}

/// A very small model and images of [`bars`], which writes no files: for tests.
pub fn small(amp: Amp, steps: u64) -> Result<(Options, Data)> {
    let common = crate::Options::silent("images", steps);
    let common = crate::Options { amp, log_every: 1, eval_every: 20, save_every: 100, ..common };
    let options = Options { width: 8, stages: 2, rows: 16, lr: 0.05, ..Options::new(common) };
    let options = Options { swa_every: 2, swa_batches: 4, ..options };
    let data = Data::new(bars(0, 240), bars(240, 50), [8, 8], "bars".to_owned())?;
    Ok((options, data))
}

/// Images of 8 x 8 pixels with noise and bars from left to right, from top to bottom, or both.
pub fn bars(first: u64, count: u64) -> Images {
    let pixel = |image: u64, place: u64| {
        let bars = [place / 8, place % 8].map(|line| line.is_multiple_of(3));
        let is_bright = match image % 3 {
            0 => bars[0],
            1 => bars[1],
            _ => bars[0] != bars[1],
        };
        let noise = mixed(image << 6 | place) % 80;
        noise as u8 + if is_bright { 120 } else { 0 }
    };
    let image = |image| (0..64).map(move |place| pixel(image, place));
    let images = first..first + count;
    Images {
        pixels: images.clone().flat_map(image).collect(),
        labels: images.map(|image| (image % 3) as u8).collect(),
    }
}

/// Takes a few steps of the small model in this process.
pub fn short_run(device: Device, amp: Amp, steps: u64) -> Result<Run> {
    let (options, data) = small(amp, steps)?;
    let run = run_alone(&options, &data, device, &Interrupt::never())?;
    // The report of the run can be made, too.
    report::page(&options, std::slice::from_ref(&run), &data, device, &Ranks::alone()).to_html();
    Ok(run)
}

/// Trains in this process, without progress.
pub fn run_alone(
    options: &Options,
    data: &Data,
    device: Device,
    interrupt: &Interrupt,
) -> Result<Run> {
    options.check_data(data)?;
    let set = Set::new(data, options.moved, device);
    train(options, data, &set, &Session::alone(device, interrupt.clone()), &Progress::silent())
}

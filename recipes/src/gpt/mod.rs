//! The recipe `gpt`: the program and its run.

pub mod data;
pub mod kept;
pub mod model;
pub mod options;
pub mod reader;
pub mod report;
pub mod train;
pub mod vocabulary;

use crate::precision_name;
use crate::training::{self, Plan};
use crate::{Ended, Interrupt, Log, Progress, Ranks, Session};
use anyhow::Result;
use data::Text;
use kept::Kept;
use options::Options;
use std::ffi::OsString;
use tch::Device;
use tch_amp::Amp;
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
    /// What the backward pass keeps, if it was measured.
    pub kept: Option<Kept>,
}

/// Runs the program with these arguments.
pub fn main(args: impl IntoIterator<Item: Into<OsString>>) -> Result<Ended> {
    let Some(mut options) = Options::parse(args)? else { return Ok(Ended::Finished) };
    let Some(session) = Session::start(&mut options.common)? else { return Ok(Ended::Finished) };
    let text = match &options.text {
        Some(path) => Text::read(path)?,
        None => Text::load()?,
    };
    let text = match options.words {
        Some(count) => text.in_words(count)?,
        None => text,
    };
    let name = format!("GPT {}", precision_name(options.common.amp));
    let crate::Options { steps, log_every, .. } = options.common;
    let progress = Progress::on_first(&session.ranks, &name, steps, log_every)?;
    progress.say(&format!("The text: {}", text.origin));
    let run = train(&options, &text, &session, &progress)?;
    progress.finish();
    if session.ranks.is_first() && run.ended == Ended::Finished {
        report::write(&options, &run, &text, session.device, &session.ranks)?;
    }
    Ok(run.ended)
}

/// Trains from the first step, or from the newest checkpoint, until all steps are done or the run is interrupted.
pub fn train(
    options: &Options,
    text: &Text,
    session: &Session,
    progress: &Progress,
) -> Result<Run> {
    let Session { ranks, device, interrupt } = session;
    let mut trainer = Trainer::new(options, text, *device, ranks)?;
    let plan = Plan { options: &options.common, of_run: options.of_run(text) };
    let trained = training::train(&mut trainer, &plan, ranks, interrupt, progress)?;
    let writes = trained.ended == Ended::Finished && ranks.is_first();
    let sample = if writes { trainer.write(options.sample)? } else { String::new() };
    let kept = if writes { trainer.kept() } else { None };
    Ok(Run { ended: trained.ended, log: trained.log, skipped: trained.skipped, sample, kept })
}

/// A very small model, which writes no files: for tests.
pub fn small(amp: Amp, steps: u64) -> Result<(Options, Text)> {
    let common = crate::Options { amp, log_every: 1, ..crate::Options::silent("gpt", steps) };
    let options = Options { width: 64, layers: 1, length: 16, rows: 2, ..Options::new(common) };
    let options = Options { sample: 4, recompute: true, ..options };
    let line = "    pub fn learn(&mut self, text: &[u8]) -> Result<()> { self.read(text) }\n";
    Ok((options, Text::new(line.repeat(200).into_bytes(), "a line, again and again".to_owned())?))
}

/// Takes a few steps of the small model in this process.
pub fn short_run(device: Device, amp: Amp, steps: u64) -> Result<Run> {
    let (options, text) = small(amp, steps)?;
    let run = run_alone(&options, &text, device, &Interrupt::never())?;
    // The report of the run can be made, too.
    report::page(&options, &run, &text, device, &Ranks::alone()).to_html();
    Ok(run)
}

/// Trains in this process, without progress.
pub fn run_alone(
    options: &Options,
    text: &Text,
    device: Device,
    interrupt: &Interrupt,
) -> Result<Run> {
    let session = Session::alone(device, interrupt.clone());
    train(options, text, &session, &Progress::silent())
}

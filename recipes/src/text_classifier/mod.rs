//! The recipe `text_classifier`: the program and its run.

pub mod batch;
pub mod data;
pub mod lines;
pub mod model;
pub mod options;
pub mod pretrained;
pub mod python;
pub mod report;
pub mod tokens;
pub mod train;

use crate::precision_name;
use crate::training::{self, Plan};
use crate::writable::check_file;
use crate::{Confusion, Ended, Interrupt, Log, Progress, Ranks, Session};
use anyhow::{Context, Result};
use data::Data;
use model::{Config, Pooling};
use options::Options;
use std::ffi::OsString;
use std::sync::Arc;
use std::time::Instant;
use tch::Device;
use tch::nn::VarStore;
use tch_amp::Amp;
use tokens::Tokens;
use train::Trainer;

/// The sentences, and the model that is to learn them.
#[derive(Debug)]
pub struct Task<'a> {
    pub data: &'a Data,
    pub tokens: Arc<Tokens>,
    pub config: Config,
    pretrained: Option<&'a std::path::Path>,
}

/// What a run has left.
#[derive(Debug)]
pub struct Run {
    /// Whether it has done all of its steps.
    pub ended: Ended,
    /// The numbers of all steps, also of those before it was resumed.
    pub log: Log,
    /// The answers of the best weights in the test; none if it was interrupted.
    pub test: Confusion,
    /// Their answers on the held-out sentences, by which they were chosen.
    pub held_out: Confusion,
    /// After how many steps the weights were the best.
    pub best_step: Option<u64>,
    /// How many steps were skipped because the gradients were not finite.
    pub skipped: u64,
    /// How long it took, without what came before it was resumed.
    pub seconds: f64,
}

/// Runs the program with these arguments.
pub fn main(args: impl IntoIterator<Item: Into<OsString>>) -> Result<Ended> {
    let Some(mut options) = Options::parse(args)? else { return Ok(Ended::Finished) };
    let Some(session) = Session::start(&mut options.common)? else { return Ok(Ended::Finished) };
    let check = || options.weights.as_deref().map_or(Ok(()), check_file);
    session.ranks.on_first(|| check().context("--weights"))?;
    let data = options.sentences()?;
    let options = options.resolved(session.ranks.size(), data.train.len())?;
    let task = Task::new(&options, &data)?;
    let name = format!("BERT {}", precision_name(options.common.amp));
    let crate::Options { steps, log_every, .. } = options.common;
    let progress = Progress::on_first(&session.ranks, &name, steps, log_every)?;
    progress.say(&data.describe());
    let run = train(&options, &task, &session, &progress)?;
    progress.finish();
    if session.ranks.is_first() && run.ended == Ended::Finished {
        report::write(&options, &run, &task, session.device, &session.ranks)?;
    }
    Ok(run.ended)
}

impl<'a> Task<'a> {
    /// Makes or reads the vocabulary.
    pub fn new(options: &'a Options, data: &'a Data) -> Result<Self> {
        let pretrained = options.pretrained.as_deref();
        let (tokens, config) = match pretrained {
            Some(folder) => pretrained::describe(folder, options.length)?,
            None => {
                let texts = data.train.iter().map(|(text, _)| text.as_str());
                let tokens = Tokens::train(texts, options.vocabulary)?;
                let config = options.model(tokens.vocabulary.len());
                (tokens, config)
            }
        };
        Ok(Self { data, tokens: Arc::new(tokens), config, pretrained })
    }

    /// Loads the pretrained weights, if the run begins with some.
    pub fn load_weights(&self, pooling: Pooling, vs: &VarStore) -> Result<()> {
        self.pretrained.map_or(Ok(()), |folder| pretrained::load(folder, pooling, vs))
    }
}

/// Trains from the first step, or from the newest checkpoint, until all steps are done or the run is interrupted.
pub fn train(
    options: &Options,
    task: &Task<'_>,
    session: &Session,
    progress: &Progress,
) -> Result<Run> {
    let Session { ranks, device, interrupt } = session;
    let begun = Instant::now();
    let mut trainer = Trainer::new(options, task, *device, ranks)?;
    let of_run = options.of_run(task.data, task.config);
    let plan = Plan { options: &options.common, of_run };
    let trained = training::train(&mut trainer, &plan, ranks, interrupt, progress)?;
    if options.no_eval && trained.ended == Ended::Finished {
        trainer.save_weights()?;
    }
    let best_step = trainer.reload_best()?.map(|best| best.1);
    let classify = |sentences| match trained.ended {
        Ended::Finished => trainer.classify(sentences),
        Ended::Interrupted { .. } => Ok(Confusion::none(task.data.labels.len())),
    };
    let (held_out, test) = (classify(&trainer.held_out)?, classify(&trainer.test)?);
    let seconds = begun.elapsed().as_secs_f64();
    let (ended, skipped) = (trained.ended, trained.skipped);
    Ok(Run { ended, log: trained.log, test, held_out, best_step, skipped, seconds })
}

/// A very small model, which writes no files: for tests. The second word of each sentence says what its label is.
pub fn small(amp: Amp, steps: u64) -> Result<(Options, Data)> {
    let common = crate::Options::silent("text_classifier", steps);
    let common = crate::Options { amp, log_every: 1, eval_every: 4, ..common };
    let options = Options { width: 64, layers: 1, length: 16, rows: 8, ..Options::new(common) };
    let options = Options { vocabulary: 200, ..options };
    let line = |i: usize| {
        let words = [["cat", "purrs"], ["dog", "barks"], ["bird", "sings"]][i % 3];
        let text = format!("Some {} {}{}", words[0], "loudly ".repeat(i % 4), words[1]);
        (words[0].to_owned(), format!("{text} in the year {i}"))
    };
    Ok((options, Data::new((0..120).map(line).collect(), "sentences about pets".to_owned())?))
}

/// Takes a few steps of the small model in this process.
pub fn short_run(device: Device, amp: Amp, steps: u64) -> Result<Run> {
    let (options, data) = small(amp, steps)?;
    let run = run_alone(&options, &data, device, &Interrupt::never())?;
    // The report of the run can be made, too.
    report::page(&options, &run, &Task::new(&options, &data)?, device, &Ranks::alone()).to_html();
    Ok(run)
}

/// Trains in this process, without progress.
pub fn run_alone(
    options: &Options,
    data: &Data,
    device: Device,
    interrupt: &Interrupt,
) -> Result<Run> {
    let options = options.clone().resolved(1, data.train.len())?;
    let task = Task::new(&options, data)?;
    let session = Session::alone(device, interrupt.clone());
    train(&options, &task, &session, &Progress::silent())
}

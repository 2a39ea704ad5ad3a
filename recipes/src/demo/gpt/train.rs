//! The recipe `gpt` in one precision, watched more closely: the loss and the time of every step, and its memory. Both
//! precisions train alike.

use super::incident::{self, Incident};
use crate::demo::speed;
use crate::gpt::data::Text;
use crate::gpt::options::Options as Recipe;
use crate::gpt::train::Trainer;
use crate::measure::{self, Measured, Number};
use crate::training::{self, Plan};
use crate::{Interrupt, Progress, Ranks, Region, Training};
use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use std::time::Instant;
use tch::Device;
use tch::nn::VarStore;
use tch_amp::Amp;
use tch_amp::checkpoint::Checkpoint;
use tch_amp::memory::peak_during;

/// The excerpts of a batch, and the bytes of each. With a width of 256 and four layers, the model has about three
/// million parameters.
pub const ROWS: i64 = 8;
pub const LENGTH: i64 = 128;
pub const WIDTH: i64 = 256;

/// When it is measured in which dtype each operator is fastest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Tuning {
    Never,
    /// Before the training, which follows the plan.
    Before,
    /// After the training, to say what the plan would have been.
    After,
}

/// What to train.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Options {
    pub precision: Amp,
    pub tuning: Tuning,
    /// The steps of the whole training, over which the learning rate falls.
    pub steps: usize,
    /// How many of them are taken.
    pub taken: usize,
    pub seed: i64,
    /// How many bytes to write afterwards.
    pub sample: usize,
}

/// A finished run.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    pub precision: Amp,
    /// What was measured to be fastest, in a line, if the run was tuned.
    pub plan: Option<String>,
    /// Whether the run followed a plan that keeps the whole model in f32.
    pub is_planned_f32: bool,
    /// The loss of each step, in nats per byte.
    pub losses: Vec<f64>,
    /// The seconds that each step took.
    pub seconds: Vec<f64>,
    /// The most memory that a step held beside the weights, gradients and optimizer state, in bytes.
    pub activations: Option<u64>,
    /// A text that the model wrote.
    pub sample: String,
    /// The text that it was trained on, in words.
    pub origin: String,
    /// A bad batch after the training, in bf16.
    pub incident: Option<Incident>,
}

impl Run {
    /// The median of bytes per second.
    pub fn tokens_per_second(&self) -> f64 {
        (ROWS * LENGTH) as f64 / speed::quantile(&self.seconds, 0.5)
    }

    /// The mean loss of the last `count` of the first `steps` steps.
    pub fn loss(&self, count: usize, steps: usize) -> f64 {
        let first = &self.losses[..steps.min(self.losses.len())];
        let last = &first[first.len().saturating_sub(count)..];
        last.iter().sum::<f64>() / last.len() as f64
    }
}

/// Trains once. The initial weights and the batches depend on the seed only, not on the precision.
pub fn train(options: Options, text: &Text, device: Device, progress: &Progress) -> Result<Run> {
    ensure!(options.taken > 2, "at least three steps are needed");
    let recipe = recipe(options);
    let ranks = Ranks::alone();
    let trainer = Trainer::new(&recipe, text, device, &ranks)?;
    let (losses, seconds, activations) = (Vec::new(), Vec::new(), None);
    let mut watched = Watched { trainer, plan: None, losses, seconds, activations };
    let first = crate::Options { steps: options.taken as u64, ..recipe.common.clone() };
    let of_run = Plan { options: &first, of_run: recipe.of_run(text) };
    drop(training::train(&mut watched, &of_run, &ranks, &Interrupt::never(), progress)?);
    progress.finish();
    let Watched { mut trainer, mut plan, losses, seconds, activations } = watched;
    let sample = trainer.write(options.sample)?;
    let is_half = options.precision != Amp::Off;
    let is_planned_f32 = trainer.region.is_planned_f32();
    let incident =
        is_half.then(|| incident::cause(&mut trainer, text, [ROWS, LENGTH])).transpose()?;
    if options.tuning == Tuning::After {
        let wanted = crate::Options { wants_plan: true, ..recipe.common.clone() };
        trainer.region = Region::new(trainer.region.autocast(), &wanted);
        plan = trainer.tune()?;
    }
    let (precision, origin) = (options.precision, text.origin.clone());
    Ok(Run {
        precision,
        plan,
        is_planned_f32,
        losses,
        seconds,
        activations,
        sample,
        origin,
        incident,
    })
}

/// The options of the recipe: a small model, whose gradients are not accumulated.
fn recipe(Options { precision, tuning, steps, seed, .. }: Options) -> Recipe {
    let last = steps as u64;
    let silent = crate::Options::silent("gpt", last);
    let silent = crate::Options { log_every: 1, eval_every: last, save_every: last, ..silent };
    let wants_plan = tuning == Tuning::Before;
    let common = crate::Options { amp: precision, wants_plan, seed, ..silent };
    let (rows, length) = (ROWS as usize, LENGTH);
    Recipe { rows, length, width: WIDTH, micro_batches: 1, dropout: 0.0, ..Recipe::new(common) }
}

/// The trainer of the recipe, and what the demo measures of each step.
struct Watched<'a> {
    trainer: Trainer<'a>,
    plan: Option<String>,
    losses: Vec<f64>,
    seconds: Vec<f64>,
    activations: Option<u64>,
}

impl Training for Watched<'_> {
    type Measured = Measured;

    const COLUMNS: &'static [&'static str] = Trainer::COLUMNS;

    fn tune(&mut self) -> Result<Option<String>> {
        self.plan = self.trainer.tune()?;
        Ok(self.plan.clone())
    }

    fn step(&mut self) -> Result<Measured> {
        let (done, is_on_cpu) = (self.losses.len(), self.trainer.device == Device::Cpu);
        let start = Instant::now();
        let (measured, bytes) = peak_during(|| self.trainer.step())?;
        let measured = measured?;
        let loss = measured.loss.double_value(&[]);
        // The second step: the first one has made the optimizer's state.
        if done == 1 && is_on_cpu {
            self.activations = Some(bytes);
        }
        // The first steps allocate what later ones use again.
        if done > 1 {
            self.seconds.push(start.elapsed().as_secs_f64());
        }
        self.losses.push(loss);
        Ok(measured)
    }

    fn read(&mut self, measured: &Measured, since: Instant) -> Result<Vec<Number>> {
        self.trainer.read(measured, since)
    }

    fn words(&self, numbers: &[Number]) -> String {
        format!("loss {:.3}", measure::find(numbers, measure::LOSS).unwrap_or(f64::NAN))
    }

    fn save(&mut self, checkpoint: &mut Checkpoint) -> Result<()> {
        self.trainer.save(checkpoint)
    }

    fn restore(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        self.trainer.restore(checkpoint)
    }

    fn taken(&mut self) -> Result<u64> {
        self.trainer.taken()
    }

    fn weights(&self) -> &VarStore {
        self.trainer.weights()
    }
}

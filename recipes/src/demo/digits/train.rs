//! Training in one precision. All three precisions use the same loop.

use super::data::{Digits, Split};
use super::model;
use super::options::Options;
use crate::demo::speed;
use crate::log::Row;
use crate::measure::{LOSS, Number, SCALE};
use crate::memory::PeakMemory;
use crate::precision_name;
use crate::ranks::Gradients;
use crate::training::{self, Plan};
use crate::{Interrupt, Progress, Ranks, Training};
use anyhow::{Context, Result};
use std::time::Instant;
use tch::data::Iter2;
use tch::nn::{Module, VarStore};
use tch::{Device, Tensor};
use tch_amp::Amp;
use tch_amp::checkpoint::{Checkpoint, Rng};
use tch_amp::optim::{AdamW, Optimizer};
use tch_amp::scaler::GradScalerConfig;
use tch_amp::{Autocast, GradScaler, MixedPrecision};

const LEARNING_RATE: f64 = 3e-3;

/// Steps without overflow before the scale doubles. With PyTorch's 2000 it would not change in a run this short.
pub const GROWTH_INTERVAL: i64 = 20;

/// The scaler. A disabled one leaves losses and gradients unchanged, so the loop needs no `if`.
fn scaler(precision: &MixedPrecision) -> tch_amp::Result<GradScaler> {
    let config = GradScalerConfig { growth_interval: GROWTH_INTERVAL, ..Default::default() };
    GradScalerConfig { enabled: precision.needs_scaling(), ..config }.build(precision.device())
}

/// What happened in one iteration.
#[derive(Clone, Debug)]
pub struct Step {
    /// Mean loss of the batch, before the step.
    pub loss: f64,
    /// The scale that this iteration used; `None` without a scaler.
    pub scale: Option<f64>,
    /// Whether the step was skipped because the gradients overflowed.
    pub skipped: bool,
    /// Wall time.
    pub seconds: f64,
}

/// The columns of a step beside its loss and its scale.
const SKIPPED: &str = "skipped";
const SECONDS: &str = "seconds";

impl Step {
    fn numbers(&self) -> Vec<Number> {
        let skipped = f64::from(u8::from(self.skipped));
        let numbers = [(LOSS, self.loss), (SKIPPED, skipped), (SECONDS, self.seconds)];
        numbers.into_iter().chain(self.scale.map(|scale| (SCALE, scale))).collect()
    }

    /// Reads a line of the log, whose columns are those of [`Trainer`].
    fn of(row: &Row) -> Result<Self> {
        let [Some(loss), scale, Some(skipped), Some(seconds)] = row.values[..] else {
            anyhow::bail!("the log lacks numbers of step {}", row.step);
        };
        Ok(Self { loss, scale, skipped: skipped == 1.0, seconds })
    }
}

/// One finished run.
#[derive(Clone, Debug)]
pub struct RunResult {
    /// The precision of the run.
    pub precision: Amp,
    /// Every iteration, in order.
    pub steps: Vec<Step>,
    /// Mean loss of the last epoch.
    pub final_loss: f64,
    /// The accuracy on the held-out images, in per cent.
    pub accuracy: f64,
    /// The peak memory of the process during the run, in bytes, if the system reports it.
    pub peak_memory: Option<u64>,
    /// The scale after the last iteration; `None` without a scaler.
    pub final_scale: Option<f64>,
}

impl RunResult {
    /// The number of iterations that the scaler skipped.
    pub fn skipped(&self) -> usize {
        self.steps.iter().filter(|step| step.skipped).count()
    }

    /// The seconds that each iteration took.
    pub fn seconds(&self) -> Vec<f64> {
        self.steps.iter().map(|step| step.seconds).collect()
    }

    /// The median time of an iteration in milliseconds.
    pub fn step_ms(&self) -> f64 {
        1e3 * speed::quantile(&self.seconds(), 0.5)
    }
}

/// The network with everything that trains it.
pub struct Trainer<'a, M> {
    vs: VarStore,
    net: M,
    /// A fused optimizer, which the scaler steps without synchronizing.
    optimizer: Optimizer,
    autocast: Autocast,
    /// Disabled unless the precision is fp16.
    scaler: GradScaler,
    /// Averages the gradients if there are several ranks.
    gradients: Gradients,
    ranks: &'a Ranks,
    progress: &'a Progress,
    precision: Amp,
    epochs: usize,
    device: Device,
    split: &'a Split,
    /// The rest of an epoch.
    batches: Option<Iter2>,
    /// How many epochs have begun, and the losses of the last one.
    epoch: usize,
    losses: Vec<f64>,
    taken: u64,
}

impl<M: Module> Trainer<'_, M> {
    fn scale(&self) -> tch_amp::Result<Option<f64>> {
        self.scaler.is_enabled().then(|| self.scaler.get_scale()).transpose()
    }

    /// The next batch. A checkpoint is made between two epochs, so a resumed run begins one.
    fn next_batch(&mut self) -> Result<(Tensor, Tensor)> {
        if let Some(batch) = self.batches.as_mut().and_then(Iter2::next) {
            return Ok(batch);
        }
        self.epoch += 1;
        self.losses.clear();
        self.batches.insert(self.split.shuffled(self.device)).next().context("there is no batch")
    }

    fn shown(&self, loss: f64) -> String {
        format!("epoch {:>2}/{}  loss {loss:.4}", self.epoch, self.epochs)
    }

    /// The share of images that are classified correctly, in per cent, computed in the precision of the training.
    fn accuracy(&self, split: &Split) -> Result<f64> {
        let (images, labels) =
            (split.images.to_device(self.device), split.labels.to_device(self.device));
        let logits = tch::no_grad(|| self.autocast.run(|| self.net.forward(&images)))?;
        Ok(100.0 * logits.accuracy_for_logits(&labels).double_value(&[]))
    }
}

impl<M: Module> Training for Trainer<'_, M> {
    type Measured = Step;

    const COLUMNS: &'static [&'static str] = &[LOSS, SCALE, SKIPPED, SECONDS];

    /// One training step: forward under autocast, backward on the scaled loss, step, new scale.
    fn step(&mut self) -> Result<Step> {
        let (images, labels) = self.next_batch()?;
        let (images, labels) = (self.ranks.share(&images), self.ranks.share(&labels));
        let started = Instant::now();
        let scale = self.scale()?;

        self.optimizer.zero_grad()?;
        let loss = self.gradients.forward(|| {
            self.autocast.run(|| self.net.forward(&images).cross_entropy_for_logits(&labels))
        })?;
        self.gradients.backward(&mut self.scaler, &loss)?;
        let outcome = self.scaler.step(&mut self.optimizer)?;
        self.scaler.update()?;

        // The demo records every step. Reading these numbers synchronizes, so a fast loop should do it rarely.
        let (loss, skipped) = (self.ranks.mean(&loss)?, outcome.is_skipped()?);
        self.losses.push(loss);
        self.taken += u64::from(!skipped);
        Ok(Step { loss, scale, skipped, seconds: started.elapsed().as_secs_f64() })
    }

    fn read(&mut self, step: &Step, _since: Instant) -> Result<Vec<Number>> {
        Ok(step.numbers())
    }

    /// Prints a line where there is no bar.
    fn evaluate(&mut self, _step: u64) -> Result<Vec<Number>> {
        let line = self.shown(mean(&self.losses));
        self.progress.say_in_log(&format!("{}  {line}", precision_name(self.precision)));
        Ok(Vec::new())
    }

    fn words(&self, numbers: &[Number]) -> String {
        let find = |column| crate::measure::find(numbers, column);
        let scale = find(SCALE).map_or_else(String::new, |scale| format!("  scale {scale}"));
        self.shown(find(LOSS).unwrap_or(f64::NAN)) + &scale
    }

    fn save(&mut self, checkpoint: &mut Checkpoint) -> Result<()> {
        checkpoint.add("model", &self.vs)?;
        checkpoint.add("optimizer", &mut self.optimizer)?;
        checkpoint.add("scaler", &mut self.scaler)?;
        // The batches are shuffled on the CPU.
        checkpoint.add("rng", Rng(Device::Cpu))?;
        checkpoint.add_value("epoch", &(self.epoch, self.taken))?;
        Ok(())
    }

    fn restore(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        let (epoch, taken) = checkpoint.value("epoch")?;
        checkpoint
            .restore()
            .add("model", &self.vs)
            .add("optimizer", &mut self.optimizer)
            .add("scaler", &mut self.scaler)
            .add("rng", Rng(Device::Cpu))
            .apply()?;
        (self.epoch, self.taken) = (epoch, taken);
        Ok(())
    }

    fn taken(&mut self) -> Result<u64> {
        Ok(self.taken)
    }

    fn weights(&self) -> &VarStore {
        &self.vs
    }
}

/// Trains once. The initial weights and the batches depend on the seed only, not on the precision.
pub fn train(
    precision: Amp,
    digits: &Digits,
    device: Device,
    options: &Options,
    progress: &Progress,
    ranks: &Ranks,
) -> Result<RunResult> {
    tch::manual_seed(options.seed);
    let vs = VarStore::new(device);
    let net = model::network(&vs.root());
    let optimizer = AdamW::default().build(&vs, LEARNING_RATE)?;
    let mut mixed = precision.on(device)?;
    ranks.agree(&mut mixed)?;
    let (autocast, mut scaler) = (mixed.region(), scaler(&mixed)?);
    scaler.name_parameters(&vs)?;
    let mut trainer = Trainer {
        gradients: ranks.gradients(&vs)?,
        vs,
        net,
        optimizer,
        autocast,
        scaler,
        ranks,
        progress,
        precision,
        epochs: options.epochs,
        device,
        split: &digits.train,
        batches: None,
        epoch: 0,
        losses: Vec::new(),
        taken: 0,
    };
    let memory = PeakMemory::start(device);
    let batches = digits.train.batches();
    let common = options.of(precision, batches);
    let plan = Plan { options: &common, of_run: format!("--seed {}", options.seed) };
    let interrupt = Interrupt::never();
    let trained = training::train(&mut trainer, &plan, ranks, &interrupt, progress)?;
    let steps = trained.log.rows().iter().map(Step::of).collect::<Result<Vec<_>>>()?;
    let last = steps
        .iter()
        .skip(steps.len().saturating_sub(batches))
        .map(|step| step.loss)
        .collect::<Vec<_>>();
    Ok(RunResult {
        precision,
        final_loss: mean(&last),
        accuracy: trainer.accuracy(&digits.test)?,
        peak_memory: memory.and_then(|memory| memory.read()),
        final_scale: trainer.scale()?,
        steps,
    })
}

fn mean(losses: &[f64]) -> f64 {
    losses.iter().sum::<f64>() / losses.len() as f64
}

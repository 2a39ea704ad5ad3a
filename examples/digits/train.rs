//! Training in one precision. All three precisions use the same loop.

use super::checkpoint::Saves;
use super::data::{Digits, Split};
use super::model;
use super::options::Options;
use crate::recipe::memory::PeakMemory;
use crate::recipe::ranks::Gradients;
use crate::recipe::{Precision, Progress, Ranks};
use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use std::time::Instant;
use tch::nn::{Module, VarStore};
use tch::{Device, Tensor};
use tch_amp::optim::{AdamW, Optimizer};
use tch_amp::scaler::GradScalerConfig;
use tch_amp::{Autocast, GradScaler};

const LEARNING_RATE: f64 = 3e-3;

/// Without a terminal, a line is printed after this many epochs.
const LINE_EPOCHS: usize = 5;

/// Steps without overflow before the scale doubles. With PyTorch's 2000 it would not change in a run this short.
pub const GROWTH_INTERVAL: i64 = 20;

/// The scaler. A disabled one leaves losses and gradients unchanged, so the loop needs no `if`.
fn scaler(precision: Precision, device: Device) -> tch_amp::Result<GradScaler> {
    match precision {
        Precision::Fp32 | Precision::Bf16 => Ok(GradScaler::disabled()),
        Precision::Fp16 => {
            GradScalerConfig::default().growth_interval(GROWTH_INTERVAL).build(device)
        }
    }
}

/// What happened in one iteration.
#[derive(Clone, Debug, Serialize, Deserialize)]
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

/// One finished run.
#[derive(Clone, Debug)]
pub struct RunResult {
    /// The precision of the run.
    pub precision: Precision,
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

    /// The time of an iteration in milliseconds: the median for `0.5`, the lower quartile for `0.25`.
    pub fn step_ms(&self, quantile: f64) -> f64 {
        let mut times: Vec<f64> = self.steps.iter().map(|step| step.seconds * 1e3).collect();
        times.sort_by(f64::total_cmp);
        let index = (quantile * times.len() as f64) as usize;
        times.get(index).copied().unwrap_or(f64::NAN)
    }
}

/// The network with everything that a training step needs.
pub struct Trainer<'a, M> {
    /// The weights.
    pub vs: VarStore,
    net: M,
    /// A fused optimizer, which the scaler steps without synchronizing.
    pub optimizer: Optimizer,
    autocast: Autocast,
    /// Disabled unless the precision is fp16.
    pub scaler: GradScaler,
    /// Averages the gradients if there are several ranks.
    gradients: Gradients,
    ranks: &'a Ranks,
}

impl<M: Module> Trainer<'_, M> {
    /// One training step: forward under autocast, backward on the scaled loss, step, new scale.
    fn step(&mut self, images: &Tensor, labels: &Tensor) -> Result<Step> {
        let started = Instant::now();
        let scale = self.scale()?;

        self.optimizer.zero_grad()?;
        let loss = self.gradients.forward(|| {
            self.autocast.run(|| self.net.forward(images).cross_entropy_for_logits(labels))
        })??;
        self.gradients.backward(&mut self.scaler, &loss)?;
        let outcome = self.scaler.step(&mut self.optimizer)?;
        self.scaler.update()?;

        // The demo records every step. Reading these numbers synchronizes, so a fast loop should do it rarely.
        let (loss, skipped) = (self.ranks.mean(&loss)?, outcome.is_skipped()?);
        Ok(Step { loss, scale, skipped, seconds: started.elapsed().as_secs_f64() })
    }

    fn scale(&self) -> tch_amp::Result<Option<f64>> {
        self.scaler.is_enabled().then(|| self.scaler.get_scale()).transpose()
    }

    /// The share of images that are classified correctly, in per cent, computed in the precision of the training.
    fn accuracy(&self, split: &Split, device: Device) -> Result<f64> {
        let (images, labels) = (split.images.to_device(device), split.labels.to_device(device));
        let logits = tch::no_grad(|| self.autocast.run(|| self.net.forward(&images)))?;
        Ok(100.0 * logits.accuracy_for_logits(&labels).double_value(&[]))
    }
}

/// Trains once. The initial weights and the batches depend on the seed only, not on the precision.
pub fn train(
    precision: Precision,
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
    let (autocast, mut scaler) = (precision.region(device), scaler(precision, device)?);
    scaler.name_parameters(&vs)?;
    let gradients = ranks.gradients(&vs)?;
    let mut trainer = Trainer { vs, net, optimizer, autocast, scaler, gradients, ranks };

    let saves = Saves::open(options, precision, ranks.is_first())?;
    let (done, mut steps) = saves.resume(&mut trainer)?;
    ensure!(done <= options.epochs, "{done} epochs are done; ask for more with --epochs");
    let shown =
        |epoch: usize, loss: f64| format!("epoch {epoch:>2}/{}  loss {loss:.4}", options.epochs);
    progress.resumed(steps.len() as u64);
    let memory = PeakMemory::start(device);
    for epoch in done + 1..=options.epochs {
        for (images, labels) in digits.train.shuffled(device) {
            let step = trainer.step(&ranks.share(&images), &ranks.share(&labels))?;
            let scale = step.scale.map_or_else(String::new, |scale| format!("  scale {scale}"));
            let message = shown(epoch, step.loss) + &scale;
            steps.push(step);
            progress.step(steps.len() as u64, Some(message));
        }
        if epoch.is_multiple_of(LINE_EPOCHS) || epoch == options.epochs {
            let line = shown(epoch, mean_loss(&steps, digits.train.batches()));
            progress.say_in_log(&format!("{}  {line}", precision.name()));
        }
        saves.save(epoch, &mut trainer, &steps)?;
    }
    ranks.check_weights(&trainer.vs)?;
    Ok(RunResult {
        precision,
        final_loss: mean_loss(&steps, digits.train.batches()),
        accuracy: trainer.accuracy(&digits.test, device)?,
        peak_memory: memory.and_then(|memory| memory.read()),
        final_scale: trainer.scale()?,
        steps,
    })
}

fn mean_loss(steps: &[Step], last: usize) -> f64 {
    let tail = &steps[steps.len().saturating_sub(last)..];
    tail.iter().map(|step| step.loss).sum::<f64>() / tail.len() as f64
}

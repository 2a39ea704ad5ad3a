//! Training in one precision. Both precisions use the same loop.

use super::data::Text;
use super::incident::{Incident, Training};
use super::model::{Config, Gpt};
use crate::recipe::{Precision, Progress};
use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use std::iter;
use std::time::Instant;
use tch::Device;
use tch::nn::VarStore;
use tch_amp::GradScaler;
use tch_amp::memory::{self, keep_freed_memory};
use tch_amp::optim::AdamW;

/// About three million parameters.
pub const SIZE: Config =
    Config { width: 256, layers: 4, heads: 4, length: 128, dropout: 0.0, recompute: false };
/// The excerpts of a batch.
pub const ROWS: i64 = 8;
const LEARNING_RATE: f64 = 1e-3;
const WARM_UP: f64 = 20.0;
const PROMPT: &str = "    pub fn ";

/// What to train.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    pub precision: Precision,
    pub steps: usize,
    pub seed: i64,
    /// How many bytes to write afterwards.
    pub sample: usize,
}

/// A finished run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Run {
    pub precision: Precision,
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
        let mut seconds = self.seconds.clone();
        seconds.sort_by(f64::total_cmp);
        let median = seconds.get(seconds.len() / 2).copied().unwrap_or(f64::NAN);
        (ROWS * SIZE.length) as f64 / median
    }

    /// The mean loss of the last `count` steps.
    pub fn final_loss(&self, count: usize) -> f64 {
        let tail = &self.losses[self.losses.len().saturating_sub(count)..];
        tail.iter().sum::<f64>() / tail.len() as f64
    }
}

/// Trains once. The initial weights and the batches depend on the seed only, not on the precision.
pub fn train(options: Options, text: &Text, device: Device, progress: &Progress) -> Result<Run> {
    let Options { precision, steps, seed, sample } = options;
    ensure!(steps > 2, "at least three steps are needed");
    tch::manual_seed(seed);
    let vs = VarStore::new(device);
    let model = Gpt::new(&vs.root(), SIZE);
    let mut optimizer = AdamW::default().weight_decay(0.1).build(&vs, LEARNING_RATE)?;
    // bf16 has the range of f32 and needs no loss scaling; steps with a non-finite gradient are skipped.
    let mut scaler = match precision {
        Precision::Fp32 => GradScaler::disabled(),
        half => half.scaler(device)?,
    };
    let region = precision.region(device);

    let (mut losses, mut seconds, mut activations) = (Vec::new(), Vec::new(), None);
    for step in 0..steps {
        let (tokens, targets) = text.batch(ROWS, SIZE.length, device);
        optimizer.set_lr(LEARNING_RATE * ((step + 1) as f64 / WARM_UP).min(1.0))?;
        // The second step: the first one has made the optimizer's state.
        let memory = (step == 1 && device == Device::Cpu).then(PeakMemory::start).flatten();
        let start = Instant::now();

        optimizer.zero_grad()?;
        let loss = region.run(|| model.loss(&tokens, &targets, true))?;
        scaler.backward(&loss)?;
        let _outcome = scaler.step_clip_norm(&mut optimizer, 1.0)?;
        scaler.update()?;

        let loss = loss.double_value(&[]);
        activations = memory.and_then(|memory| memory.read()).or(activations);
        if step == 1 && device == Device::Cpu {
            // Only now, though a program should begin with it: kept memory would have hidden what a step takes.
            keep_freed_memory();
        }
        // The first steps allocate what later ones use again.
        seconds.extend(iter::repeat_n(start.elapsed().as_secs_f64(), usize::from(step > 1)));
        losses.push(loss);
        progress.step(step as u64 + 1, Some(format!("loss {loss:.3}")));
    }
    progress.finish();
    let written = tch::no_grad(|| region.run(|| model.write(PROMPT, sample, device)))?;
    let incident = match precision {
        Precision::Fp32 => None,
        _ => {
            let (optimizer, scaler) = (&mut optimizer, &mut scaler);
            let training = Training { vs: &vs, model: &model, optimizer, scaler, region };
            Some(training.incident(text)?)
        }
    };
    Ok(Run {
        precision,
        losses,
        seconds,
        activations,
        sample: written,
        origin: text.origin.clone(),
        incident,
    })
}

/// The growth of the process since `start`, at its highest.
struct PeakMemory {
    before: u64,
}

impl PeakMemory {
    /// `None` if the system does not report it.
    fn start() -> Option<Self> {
        let reset = memory::reset_peak_resident();
        Some(Self { before: memory::resident().filter(|_| reset)?.now })
    }

    fn read(&self) -> Option<u64> {
        Some(memory::resident()?.peak.saturating_sub(self.before))
    }
}

//! The model with everything that trains it: the training step, the evaluation and the sample.

use super::data::Text;
use super::model::Gpt;
use super::options::Options;
use super::reader::Reader;
use crate::recipe::memory::PeakMemory;
use crate::recipe::ranks::Gradients;
use crate::recipe::{Precision, Ranks};
use anyhow::{Result, ensure};
use std::time::Instant;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::accumulation::Accumulation;
use tch_amp::average::{AveragedWeights, Ema};
use tch_amp::optim::{AdamW, Optimizer};
use tch_amp::schedule::{CosineAnnealingLr, LinearLr, Scheduler, SequentialLr};
use tch_amp::{Autocast, GradScaler};

/// The columns of the log, and the names in TensorBoard.
pub const COLUMNS: [&str; 7] =
    [LOSS, HELD_OUT, LEARNING_RATE, GRADIENT_NORM, SCALE, TOKENS_PER_SECOND, PEAK_MEMORY];
/// The mean loss of a step, before it was taken, in nats per byte.
pub const LOSS: &str = "loss";
/// The loss of the averaged weights on held-out text.
pub const HELD_OUT: &str = "held_out_loss";
/// The learning rate of the step.
pub const LEARNING_RATE: &str = "learning_rate";
/// The 2-norm of all gradients, before they were clipped.
pub const GRADIENT_NORM: &str = "gradient_norm";
/// The scale after the step, in fp16.
pub const SCALE: &str = "scale";
/// Of all ranks, since the previous line of the log.
pub const TOKENS_PER_SECOND: &str = "tokens_per_second";
/// The most memory so far, of this rank, in bytes.
pub const PEAK_MEMORY: &str = "peak_memory";

const MAX_NORM: f64 = 1.0;
const WEIGHT_DECAY: f64 = 0.1;
/// The batches of an evaluation, if the text has as many.
const EVAL_BATCHES: usize = 8;
const PROMPT: &str = "    pub fn ";

/// The model and everything that trains it.
pub struct Trainer<'a> {
    pub(super) options: &'a Options,
    pub(super) ranks: &'a Ranks,
    pub(super) device: Device,
    pub(super) vs: VarStore,
    model: Gpt,
    region: Autocast,
    pub(super) optimizer: Optimizer,
    pub(super) scaler: GradScaler,
    pub(super) schedule: Scheduler,
    pub(super) ema: AveragedWeights,
    /// Averages the gradients if there are several ranks.
    gradients: Gradients,
    pub(super) reader: Reader<'a>,
    memory: Option<PeakMemory>,
    /// How many tokens were read since the last line of the log.
    tokens: usize,
}

/// Numbers of a step, on the device.
pub struct Measured {
    loss: Tensor,
    norm: Option<Tensor>,
}

impl<'a> Trainer<'a> {
    /// Makes a model with random weights, the same ones for the same seed.
    pub fn new(
        options: &'a Options,
        text: &'a Text,
        device: Device,
        ranks: &'a Ranks,
    ) -> Result<Self> {
        let memory = PeakMemory::start(device);
        let (amp, seed, steps) = (options.common.amp, options.common.seed, options.common.steps);
        ensure!(
            options.rows.is_multiple_of(ranks.size()),
            "--rows {} cannot be divided among {} ranks",
            options.rows,
            ranks.size()
        );
        let reader = Reader::new(text, options.length, options.rows, seed)?;

        tch::manual_seed(seed);
        let vs = VarStore::new(device);
        let model = Gpt::new(&vs.root(), options.model());
        // From here on the ranks draw different numbers, for dropout.
        ranks.manual_seed(seed);
        let gradients = ranks.gradients(&vs)?;
        let mut optimizer = AdamW::default().weight_decay(WEIGHT_DECAY).build(&vs, options.lr)?;
        if options.zero {
            ranks.shard(&mut optimizer)?;
        }
        let warm_up = (steps / 10).max(1);
        let cosine = CosineAnnealingLr::new((steps - warm_up).max(1)).eta_min(0.1 * options.lr);
        let warm_up_lr = LinearLr::default().start_factor(0.01).total_iters(warm_up);
        let schedule =
            SequentialLr::new(warm_up_lr).then_at(warm_up, cosine).build(&mut optimizer)?;
        let mut scaler = amp.scaler(device)?;
        scaler.name_parameters(&vs)?;
        let ema = Ema::new(options.ema).warmup(true).build(&vs)?;
        let region = amp.region(device);
        Ok(Self {
            options,
            ranks,
            device,
            vs,
            model,
            region,
            optimizer,
            scaler,
            schedule,
            ema,
            gradients,
            reader,
            memory,
            tokens: 0,
        })
    }

    /// One training step: the gradients of all micro-batches, clipped, a step of the optimizer, of the averages and of
    /// the schedule. A step with non-finite gradients changes none of these, and lowers the scale. Nothing synchronizes.
    pub fn step(&mut self) -> Result<Measured> {
        let Options { rows, micro_batches, .. } = *self.options;
        let place = [self.ranks.rank(), self.ranks.size()];
        let mut total = Tensor::zeros([1], (Kind::Float, self.device));
        self.optimizer.zero_grad()?;
        let mut window = Accumulation::of_equal(micro_batches)?;
        while !window.is_complete() {
            let (tokens, targets) = self.reader.next(rows, place, self.device);
            // The ranks average the gradients once, in the backward pass of the last micro-batch.
            self.gradients.micro_batch(window.is_last(), &mut self.scaler, || {
                let loss = self.region.run(|| self.model.loss(&tokens, &targets, true))?;
                let loss = window.weigh(&loss)?;
                total += loss.detach();
                Ok(loss)
            })?;
        }
        let outcome = self.scaler.step_clip_norm(&mut self.optimizer, MAX_NORM)?;
        self.scaler.update()?;
        self.ema.update(&outcome)?;
        let norm = outcome.total_norm().map(Tensor::shallow_clone);
        self.schedule.step(&mut self.optimizer, outcome)?;
        self.tokens += rows * micro_batches * self.options.length as usize;
        Ok(Measured { loss: total, norm })
    }

    /// Returns the numbers of a step for the log. All ranks call this.
    pub fn read(
        &mut self,
        measured: &Measured,
        lr: f64,
        since: Instant,
    ) -> Result<Vec<(&'static str, f64)>> {
        let mut numbers = vec![(LOSS, self.ranks.mean(&measured.loss)?), (LEARNING_RATE, lr)];
        let norm = measured.norm.as_ref().map(|norm| (GRADIENT_NORM, norm.double_value(&[])));
        numbers.extend(norm);
        if self.options.common.amp == Precision::Fp16 {
            numbers.push((SCALE, self.scaler.get_scale()?));
        }
        let tokens = std::mem::take(&mut self.tokens) as f64;
        numbers.push((TOKENS_PER_SECOND, tokens / since.elapsed().as_secs_f64()));
        let peak = self.memory.and_then(PeakMemory::read);
        numbers.extend(peak.map(|bytes| (PEAK_MEMORY, bytes as f64)));
        Ok(numbers)
    }

    /// Returns the loss of the averaged weights on held-out text, in nats per byte.
    pub fn evaluate(&mut self) -> Result<f64> {
        let place = [self.ranks.rank(), self.ranks.size()];
        let _averages = self.ema.swap_in()?;
        let (mut sum, mut batches) = (Tensor::zeros([1], (Kind::Float, self.device)), 0);
        for (tokens, targets) in
            self.reader.held_out(self.options.rows, EVAL_BATCHES, place, self.device)
        {
            sum += no_grad(|| self.region.run(|| self.model.loss(&tokens, &targets, false)))?;
            batches += 1;
        }
        Ok(self.ranks.mean(&sum)? / f64::from(batches))
    }

    /// Returns a text that the averaged weights write.
    pub fn write(&mut self, bytes: usize) -> Result<String> {
        // The same text for the same weights.
        tch::manual_seed(self.options.common.seed);
        let _averages = self.ema.swap_in()?;
        Ok(no_grad(|| self.region.run(|| self.model.write(PROMPT, bytes, self.device)))?)
    }

    /// The learning rate of the next step.
    pub fn lr(&self) -> Result<f64> {
        Ok(self.optimizer.lr(0)?)
    }

    /// How many steps were skipped.
    pub fn skipped(&self) -> u64 {
        self.schedule.skipped()
    }

    /// The weights.
    pub fn weights(&self) -> &VarStore {
        &self.vs
    }
}

/// The numbers of a step that are shown with the progress.
pub fn words(numbers: &[(&str, f64)]) -> String {
    let find = |name| numbers.iter().find(|number| number.0 == name).map(|number| number.1);
    let mut words = format!("loss {:.3}", find(LOSS).unwrap_or(f64::NAN));
    if let Some(loss) = find(HELD_OUT) {
        words += &format!(", held-out {loss:.3}");
    }
    if let Some(scale) = find(SCALE) {
        words += &format!(", scale {scale}");
    }
    words + &format!(", {:.0} tokens/s", find(TOKENS_PER_SECOND).unwrap_or(f64::NAN))
}

//! The model with everything that trains it, and the training step.

use super::data::Text;
use super::measure::Measured;
use super::model::Gpt;
use super::options::Options;
use super::reader::Reader;
use crate::recipe::Ranks;
use crate::recipe::memory::{PeakMemory, check_fits};
use crate::recipe::ranks::Gradients;
use anyhow::{Result, ensure};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};
use tch_amp::accumulation::Accumulation;
use tch_amp::average::{AveragedWeights, Ema};
use tch_amp::optim::{AdamW, Optimizer};
use tch_amp::schedule::{CosineAnnealingLr, LinearLr, Scheduler, SequentialLr};
use tch_amp::{Autocast, GradScaler};

const MAX_NORM: f64 = 1.0;
const WEIGHT_DECAY: f64 = 0.1;

/// The model and everything that trains it.
pub struct Trainer<'a> {
    pub(super) options: &'a Options,
    pub(super) ranks: &'a Ranks,
    pub(super) device: Device,
    pub(super) vs: VarStore,
    pub(super) model: Gpt,
    pub(super) region: Autocast,
    pub(super) optimizer: Optimizer,
    pub(super) scaler: GradScaler,
    pub(super) schedule: Scheduler,
    pub(super) ema: AveragedWeights,
    /// Averages the gradients if there are several ranks.
    gradients: Gradients,
    pub(super) reader: Reader<'a>,
    pub(super) memory: Option<PeakMemory>,
    /// How many tokens were read since the last line of the log.
    pub(super) tokens: usize,
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
        check_fits(options.model().least_bytes(options.rows / ranks.size()), device)?;

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
    /// the schedule. Non-finite gradients change none of these, and lower the scale of fp16. Nothing synchronizes.
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

    /// The learning rate of the next step.
    pub fn lr(&self) -> Result<f64> {
        Ok(self.optimizer.lr(0)?)
    }

    /// How many steps were taken, which excludes those that were skipped because of non-finite gradients.
    pub fn taken(&self) -> u64 {
        self.schedule.steps()
    }

    /// The weights.
    pub fn weights(&self) -> &VarStore {
        &self.vs
    }
}

//! The model with everything that trains it: the training step, the evaluation, and what a checkpoint contains.

use super::data::Text;
use super::kept::Kept;
use super::model::Gpt;
use super::options::Options;
use super::reader::Reader;
use crate::measure::{self, Measured, Meter, Number};
use crate::memory::check_fits;
use crate::ranks::Gradients;
use crate::{Ranks, Region, Training, training};
use anyhow::{Result, ensure};
use std::mem;
use std::time::Instant;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::accumulation::Accumulation;
use tch_amp::average::{AveragedWeights, Ema};
use tch_amp::checkpoint::{Checkpoint, Stateful};
use tch_amp::insight::BudgetReport;
use tch_amp::optim::{AdamW, Optimizer};
use tch_amp::schedule::{CosineAnnealingLr, LinearLr, Scheduler, SequentialLr};
use tch_amp::{Autocast, GradScaler};

/// The column of the rate.
pub const TOKENS_PER_SECOND: &str = "tokens_per_second";

/// The batches of an evaluation, if the text has as many.
const EVAL_BATCHES: usize = 8;
const PROMPT: &str = "    pub fn ";
const MAX_NORM: f64 = 1.0;
const WEIGHT_DECAY: f64 = 0.1;

fn optimizer(vs: &VarStore, options: &Options) -> tch_amp::Result<Optimizer> {
    AdamW { weight_decay: WEIGHT_DECAY, ..Default::default() }.build(vs, options.lr)
}

/// The model and everything that trains it.
pub struct Trainer<'a> {
    pub(crate) options: &'a Options,
    pub(crate) ranks: &'a Ranks,
    pub(crate) device: Device,
    pub(crate) vs: VarStore,
    pub(crate) model: Gpt,
    pub(crate) region: Region,
    pub(crate) optimizer: Optimizer,
    pub(crate) scaler: GradScaler,
    pub(crate) schedule: Scheduler,
    pub(crate) ema: AveragedWeights,
    /// Averages the gradients if there are several ranks.
    gradients: Gradients,
    pub(crate) reader: Reader<'a>,
    meter: Meter,
}

impl<'a> Trainer<'a> {
    /// Makes a model with random weights, the same ones for the same seed.
    pub fn new(
        options: &'a Options,
        text: &'a Text,
        device: Device,
        ranks: &'a Ranks,
    ) -> Result<Self> {
        let (amp, seed, steps) = (options.common.amp, options.common.seed, options.common.steps);
        let precision = amp.on(device)?;
        let meter = Meter::new(amp, TOKENS_PER_SECOND).with_memory(device);
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
        let mut optimizer = optimizer(&vs, options)?;
        if options.zero {
            ranks.shard(&mut optimizer)?;
        }
        let warm_up = (steps / 10).max(1);
        let cosine =
            CosineAnnealingLr { t_max: (steps - warm_up).max(1), eta_min: 0.1 * options.lr };
        let warm_up_lr =
            LinearLr { start_factor: 0.01, total_iters: warm_up, ..Default::default() };
        let schedule =
            SequentialLr::new(warm_up_lr).then_at(warm_up, cosine).build(&mut optimizer)?;
        let mut scaler = precision.skipping_scaler()?;
        scaler.name_parameters(&vs)?;
        let ema = Ema { decay: options.ema, warmup: true, ..Ema::default() }.build(&vs)?;
        let region = Region::new(precision.region(), &options.common);
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
            meter,
        })
    }

    /// Tests that a step in half precision differs from one in f32 by rounding alone.
    pub fn budget(&mut self) -> Result<BudgetReport> {
        let empty = VarStore::new(self.vs.device());
        let vs = mem::replace(&mut self.vs, empty);
        let (options, position, region) =
            (self.options, self.reader.position, self.region.autocast());
        let report = training::budget(
            self,
            &vs,
            region,
            || optimizer(&vs, options),
            |trainer, optimizer, scaler| {
                trainer.reader.position = position;
                mem::swap(&mut trainer.optimizer, optimizer);
                mem::swap(&mut trainer.scaler, scaler);
            },
        );
        self.vs = vs;
        report
    }

    /// Returns a text that the averaged weights write.
    pub fn write(&mut self, tokens: usize) -> Result<String> {
        // The same text for the same weights.
        tch::manual_seed(self.options.common.seed);
        let _averages = self.ema.swap_in()?;
        let (model, vocabulary) = (&self.model, self.reader.vocabulary());
        // The space before a word belongs to it.
        let prompt = if vocabulary.has_words() { PROMPT.trim_end() } else { PROMPT };
        Ok(no_grad(|| self.region.run(|| model.write(vocabulary, prompt, tokens, self.device)))?)
    }

    /// Measures what a pass over an excerpt takes; `None` if that fails, as where there is no room for it: the run has its
    /// report without it.
    pub fn kept(&self) -> Option<Kept> {
        Kept::measure(self.options.model(), self.region.autocast(), self.device).ok()
    }

    /// The states of a checkpoint.
    fn parts(&mut self) -> [(&'static str, &mut dyn Stateful); 5] {
        [
            ("model", &mut self.vs),
            ("optimizer", &mut self.optimizer),
            ("scaler", &mut self.scaler),
            ("schedule", &mut self.schedule),
            ("ema", &mut self.ema),
        ]
    }
}

impl Training for Trainer<'_> {
    type Measured = Measured;

    const COLUMNS: &'static [&'static str] = &[
        measure::LOSS,
        measure::HELD_OUT,
        measure::LEARNING_RATE,
        measure::GRADIENT_NORM,
        measure::SCALE,
        TOKENS_PER_SECOND,
        measure::PEAK_MEMORY,
    ];

    fn tune(&mut self) -> Result<Option<String>> {
        let Self { reader, model, options, ranks, device, .. } = self;
        self.region.tune(ranks, &self.vs, &self.scaler, || {
            let position = reader.position;
            let (tokens, targets) =
                reader.next(options.rows, [ranks.rank(), ranks.size()], *device);
            reader.position = position;
            Ok(move |region: Autocast| region.try_run(|| model.loss(&tokens, &targets, true)))
        })
    }

    /// One training step: the gradients of all micro-batches, clipped, a step of the optimizer, of the averages and of
    /// the schedule. Non-finite gradients change none of these, and lower the scale of fp16. Nothing synchronizes.
    fn step(&mut self) -> Result<Measured> {
        let Options { rows, micro_batches, .. } = *self.options;
        let place = [self.ranks.rank(), self.ranks.size()];
        let lr = self.optimizer.lr(0)?;
        let mut loss = Tensor::zeros([1], (Kind::Float, self.device));
        self.optimizer.zero_grad()?;
        let mut window = Accumulation::of_equal(micro_batches)?;
        while !window.is_complete() {
            let (tokens, targets) = self.reader.next(rows, place, self.device);
            // The ranks average the gradients once, in the backward pass of the last micro-batch.
            self.gradients.micro_batch(window.is_last(), &mut self.scaler, || {
                let of_batch = self.region.try_run(|| self.model.loss(&tokens, &targets, true))?;
                let of_batch = window.weigh(&of_batch)?;
                loss += of_batch.detach();
                Ok(of_batch)
            })?;
        }
        let outcome = self.scaler.step_clip_norm(&mut self.optimizer, MAX_NORM)?;
        self.scaler.update()?;
        self.ema.update(&outcome)?;
        let norm = outcome.total_norm().map(Tensor::shallow_clone);
        self.schedule.step(&mut self.optimizer, &outcome)?;
        self.meter.count += rows * micro_batches * self.options.length as usize;
        Ok(Measured { loss, norm, lr, sent: None })
    }

    fn read(&mut self, measured: &Measured, since: Instant) -> Result<Vec<Number>> {
        self.meter.read(measured, since, &self.scaler, self.ranks)
    }

    /// The loss of the averaged weights on held-out text, in nats per token.
    fn evaluate(&mut self, _step: u64) -> Result<Vec<Number>> {
        let place = [self.ranks.rank(), self.ranks.size()];
        let _averages = self.ema.swap_in()?;
        let (mut sum, mut batches) = (Tensor::zeros([1], (Kind::Float, self.device)), 0);
        for (tokens, targets) in
            self.reader.held_out(self.options.rows, EVAL_BATCHES, place, self.device)
        {
            sum += no_grad(|| self.region.try_run(|| self.model.loss(&tokens, &targets, false)))?;
            batches += 1;
        }
        Ok(vec![(measure::HELD_OUT, self.ranks.mean(&sum)? / f64::from(batches))])
    }

    fn words(&self, numbers: &[Number]) -> String {
        self.meter.words(numbers)
    }

    fn save(&mut self, checkpoint: &mut Checkpoint) -> Result<()> {
        checkpoint.add_all(self.parts())?;
        self.ranks.add_rngs(checkpoint, self.device)?;
        self.region.save(checkpoint)?;
        checkpoint.add_value("position", &self.reader.position)?;
        Ok(())
    }

    fn restore(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        let position = checkpoint.value("position")?;
        let (ranks, device) = (self.ranks, self.device);
        let restore = checkpoint.restore().add_all(self.parts());
        ranks.rngs(restore, checkpoint, device).apply()?;
        self.region.restore(checkpoint)?;
        self.reader.position = position;
        Ok(())
    }

    fn taken(&mut self) -> Result<u64> {
        Ok(self.schedule.steps())
    }

    fn weights(&self) -> &VarStore {
        &self.vs
    }
}

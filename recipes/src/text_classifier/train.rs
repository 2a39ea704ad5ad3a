//! The model with everything that trains it: the training step, the evaluation, and what a checkpoint contains.

use super::Task;
use super::batch::{Batch, Collate, Order, Reader};
use super::data::Data;
use super::model::Classifier;
use super::options::Options;
use crate::measure::{self, Measured, Meter, Number};
use crate::memory::check_fits;
use crate::ranks::Gradients;
use crate::{Confusion, Ranks, Region, Training};
use anyhow::{Context, Result};
use std::time::Instant;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::checkpoint::{Checkpoint, Stateful, save_weights};
use tch_amp::optim::{AdamW, Optimizer};
use tch_amp::schedule::{ConstantLr, LinearLr, Schedule, Scheduler, SequentialLr};
use tch_amp::{Autocast, GradScaler, MixedPrecision};

/// The column of the rate.
const SENTENCES_PER_SECOND: &str = "sentences_per_second";

/// The parameters that are not pulled towards zero, by their names.
const NO_DECAY: [&str; 2] = ["*.bias", "*LayerNorm.weight"];

/// The model and everything that trains it.
pub struct Trainer<'a> {
    pub(super) options: &'a Options,
    pub(super) ranks: &'a Ranks,
    pub(super) device: Device,
    pub(super) vs: VarStore,
    /// The weights of the best evaluation so far.
    best: VarStore,
    /// The accuracy of the best evaluation, and after how many steps it was.
    pub(super) best_of: Option<(f64, u64)>,
    pub(super) model: Classifier,
    pub(super) region: Region,
    optimizer: Optimizer,
    pub(super) scaler: GradScaler,
    schedule: Scheduler,
    /// Averages the gradients if there are several ranks.
    gradients: Gradients,
    train: Batches,
    pub(super) held_out: Reader,
    pub(super) test: Reader,
    meter: Meter,
}

impl<'a> Trainer<'a> {
    /// Makes a model with random weights, the same ones for the same seed, or with the pretrained ones.
    pub fn new(
        options: &'a Options,
        task: &Task<'_>,
        device: Device,
        ranks: &'a Ranks,
    ) -> Result<Self> {
        let (amp, seed) = (options.common.amp, options.common.seed);
        let precision = amp.on(device)?;
        let (config, labels) = (task.config, task.data.labels.len());
        let Options { pooling, dropout, .. } = *options;
        let [train, held_out, test] = readers(options, task, ranks);
        check_fits(config.least_bytes(train.least_tokens() as f64), device)?;

        let best = VarStore::new(device);
        let _best = Classifier::new(&best.root(), config, pooling, labels, dropout);
        tch::manual_seed(seed);
        let vs = VarStore::new(device);
        let model = Classifier::new(&vs.root(), config, pooling, labels, dropout);
        task.load_weights(pooling, &vs)?;
        // From here on the ranks draw different numbers, for dropout.
        ranks.manual_seed(seed);
        let gradients = ranks.compressed_gradients(&vs, options.compress)?;
        let mut optimizer = optimizer(options, &vs)?;
        let schedule = schedule(options).build(&mut optimizer)?;
        let mut scaler = precision.skipping_scaler()?;
        scaler.name_parameters(&vs)?;
        Ok(Self {
            options,
            ranks,
            device,
            vs,
            best,
            best_of: None,
            model,
            region: Region::new(region(&precision), &options.common),
            optimizer,
            scaler,
            schedule,
            gradients,
            train: Batches::new(train, options.workers),
            held_out,
            test,
            meter: Meter::new(amp, SENTENCES_PER_SECOND).with_memory(device),
        })
    }

    /// Classifies all these sentences. Each rank takes a part, and all of them get all logits. The loss is the mean
    /// over the sentences, or the sum of the means of the batches, each of them the mean of the ranks.
    pub fn classify(&self, sentences: &Reader) -> Result<Confusion> {
        let (mut logits, mut labels) = (Vec::new(), Vec::new());
        let mut sum = Tensor::zeros([], (Kind::Float, self.device));
        for batch in sentences.batches(0, self.options.workers) {
            let batch = batch?.to(self.device);
            let part = no_grad(|| self.region.try_run(|| self.model.logits(&batch, false)))?;
            sum += part.cross_entropy_for_logits(&batch.labels);
            logits.push(self.ranks.gather(&part)?);
            labels.push(self.ranks.gather(&batch.labels)?);
        }
        // The last batch may have some sentences twice.
        let all = |parts: &[Tensor]| {
            Tensor::cat(parts, 0).narrow(0, 0, sentences.len() as i64).to_device(Device::Cpu)
        };
        let confusion = Confusion::new(&all(&logits), &all(&labels))?;
        let loss = if self.options.sums_loss { self.ranks.mean(&sum)? } else { confusion.loss };
        Ok(Confusion { loss, ..confusion })
    }

    /// Saves the weights alone, if the options want that.
    pub fn save_weights(&self) -> Result<()> {
        let Some(path) = &self.options.weights else { return Ok(()) };
        self.ranks.on_first(|| Ok(save_weights(path, &self.vs.variables())?))?;
        Ok(())
    }

    /// Keeps a copy of the weights if they are better than all before.
    fn keep_best(&mut self, accuracy: f64, step: u64) -> Result<()> {
        if self.best_of.is_some_and(|(best, _)| accuracy <= best) {
            return Ok(());
        }
        self.best.copy(&self.vs)?;
        self.best_of = Some((accuracy, step));
        self.save_weights()
    }

    /// Takes the best weights, and returns their accuracy and after how many steps they were.
    pub fn reload_best(&mut self) -> Result<Option<(f64, u64)>> {
        if self.best_of.is_some() {
            self.vs.copy(&self.best)?;
        }
        Ok(self.best_of)
    }

    /// The states of a checkpoint.
    fn parts(&mut self) -> [(&'static str, &mut dyn Stateful); 5] {
        [
            ("model", &mut self.vs),
            ("best", &mut self.best),
            ("optimizer", &mut self.optimizer),
            ("scaler", &mut self.scaler),
            ("schedule", &mut self.schedule),
        ]
    }
}

/// The region, with PyTorch's lists alone: one of the crate's own keeps `tanh`, which pools the tokens, in f32 on a CPU,
/// so that the bits would not be those of the published trainer.
fn region(precision: &MixedPrecision) -> Autocast {
    let region = Autocast::new(precision.device());
    precision.dtype().map_or(region.enabled(false), |dtype| region.dtype(dtype))
}

impl Training for Trainer<'_> {
    type Measured = Measured;

    const COLUMNS: &'static [&'static str] = &[
        measure::LOSS,
        measure::HELD_OUT,
        measure::ACCURACY,
        measure::LEARNING_RATE,
        measure::GRADIENT_NORM,
        measure::SCALE,
        SENTENCES_PER_SECOND,
        measure::PEAK_MEMORY,
        measure::SENT,
    ];

    fn tune(&mut self) -> Result<Option<String>> {
        let Self { train, model, device, .. } = self;
        self.region.tune(self.ranks, &self.vs, &self.scaler, || {
            let read = train.read;
            let batch = train.next()?.to(*device);
            train.go_on_after(read);
            Ok(move |region: Autocast| {
                region.try_run(|| {
                    Ok(model.logits(&batch, true)?.cross_entropy_for_logits(&batch.labels))
                })
            })
        })
    }

    /// One training step: the gradients of a batch, a step of the optimizer and of the schedule. Non-finite
    /// gradients change neither, and lower the scale of fp16. Nothing synchronizes.
    fn step(&mut self) -> Result<Measured> {
        let lr = self.optimizer.lr(0)?;
        let batch = self.train.next()?.to(self.device);
        self.optimizer.zero_grad()?;
        // Each rank has equally many sentences, so the mean of the ranks is that of the batch.
        let loss = self.gradients.forward(|| {
            self.region.try_run(|| {
                Ok(self.model.logits(&batch, true)?.cross_entropy_for_logits(&batch.labels))
            })
        })?;
        let before = self.ranks.sent(self.device);
        self.gradients.backward(&mut self.scaler, &loss)?;
        let sent = self.ranks.sent(self.device).zip(before).map(|(after, before)| after - before);
        let outcome = match self.options.max_norm {
            Some(norm) => self.scaler.step_clip_norm(&mut self.optimizer, norm)?,
            None => self.scaler.step(&mut self.optimizer)?,
        };
        self.scaler.update()?;
        let norm = outcome.total_norm().map(Tensor::shallow_clone);
        self.schedule.step(&mut self.optimizer, &outcome)?;
        self.meter.count += batch.labels.size()[0] as usize * self.ranks.size();
        Ok(Measured { loss: loss.detach(), norm, lr, sent })
    }

    fn read(&mut self, measured: &Measured, since: Instant) -> Result<Vec<Number>> {
        self.meter.read(measured, since, &self.scaler, self.ranks)
    }

    /// Keeps the weights if they are the best so far on held-out sentences.
    fn evaluate(&mut self, step: u64) -> Result<Vec<Number>> {
        if self.options.no_eval {
            return Ok(Vec::new());
        }
        let confusion = self.classify(&self.held_out)?;
        let accuracy = confusion.accuracy();
        self.keep_best(accuracy, step)?;
        Ok(vec![(measure::HELD_OUT, confusion.loss), (measure::ACCURACY, accuracy)])
    }

    fn words(&self, numbers: &[Number]) -> String {
        let words = self.meter.words(numbers);
        let Some(epochs) = self.options.epochs else { return words };
        format!("epoch {}/{epochs}, {words}", self.train.epoch())
    }

    fn save(&mut self, checkpoint: &mut Checkpoint) -> Result<()> {
        checkpoint.add_all(self.parts())?;
        self.ranks.add_rngs(checkpoint, self.device)?;
        self.region.save(checkpoint)?;
        checkpoint.add_value("best_of", &self.best_of)?;
        checkpoint.add_value("batches", &self.train.read)?;
        Ok(())
    }

    fn restore(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        let read = checkpoint.value("batches")?;
        let best_of = checkpoint.value("best_of")?;
        let (ranks, device) = (self.ranks, self.device);
        let restore = checkpoint.restore().add_all(self.parts());
        ranks.rngs(restore, checkpoint, device).apply()?;
        self.region.restore(checkpoint)?;
        self.train.go_on_after(read);
        self.best_of = best_of;
        Ok(())
    }

    fn taken(&mut self) -> Result<u64> {
        Ok(self.schedule.steps())
    }

    fn weights(&self) -> &VarStore {
        &self.vs
    }
}

/// The batches to learn, one after the other.
struct Batches {
    reader: Reader,
    workers: usize,
    /// How many were read so far. A checkpoint has this number, from which a resumed run goes on.
    read: u64,
    /// What the workers prepare; they start with the first batch that is read.
    ahead: Option<Box<dyn Iterator<Item = Result<Batch>>>>,
}

impl Batches {
    fn new(reader: Reader, workers: usize) -> Self {
        Self { reader, workers, read: 0, ahead: None }
    }

    fn next(&mut self) -> Result<Batch> {
        let (reader, read, workers) = (&self.reader, self.read, self.workers);
        let ahead = self.ahead.get_or_insert_with(|| Box::new(reader.batches(read, workers)));
        self.read += 1;
        ahead.next().context("there are no more batches")?
    }

    /// The epoch of the last batch that was read.
    fn epoch(&self) -> u64 {
        self.reader.epoch_of(self.read.saturating_sub(1))
    }

    fn go_on_after(&mut self, read: u64) {
        (self.read, self.ahead) = (read, None);
    }
}

/// Reads the sentences to learn, those that are held out, and those of the test.
fn readers(options: &Options, task: &Task<'_>, ranks: &Ranks) -> [Reader; 3] {
    let Options { length, pads_to_length, rows, .. } = *options;
    let collate = Collate { tokens: task.tokens.clone(), length, pads_to_length };
    let shuffled = options.epochs.is_some();
    let order = if shuffled { Order::Epochs } else { Order::Endless { seed: options.common.seed } };
    let once = Order::Once { shuffled };
    let dev_rows = options.dev_rows.unwrap_or(rows);
    let Data { train, held_out, test, .. } = task.data;
    [(train, order, rows), (held_out, once, dev_rows), (test, once, dev_rows)]
        .map(|(sentences, order, rows)| Reader::new(sentences, &collate, order, rows, ranks))
}

/// AdamW, without weight decay for some parameters.
fn optimizer(options: &Options, vs: &VarStore) -> Result<Optimizer> {
    let Options { weight_decay, eps, lr, .. } = *options;
    let mut optimizer = AdamW { weight_decay, eps, ..Default::default() }.build(vs, lr)?;
    optimizer.assign_group(1, &NO_DECAY)?;
    optimizer.set_weight_decay_group(1, 0.0)?;
    Ok(optimizer)
}

/// A warm-up in a tenth of the steps and a fall to zero, or a learning rate that stays as it is.
fn schedule(options: &Options) -> Schedule {
    if options.constant_lr {
        return ConstantLr { factor: 1.0, ..Default::default() }.into();
    }
    let steps = options.common.steps;
    let warm_up = (steps / 10).max(1);
    let rise = LinearLr { start_factor: 0.01, total_iters: warm_up, ..Default::default() };
    let total_iters = steps.saturating_sub(warm_up).max(1);
    let fall = LinearLr { start_factor: 1.0, end_factor: 0.0, total_iters };
    SequentialLr::new(rise).then_at(warm_up, fall).into()
}

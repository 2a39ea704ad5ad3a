//! The model with everything that trains it: the training step, the evaluation, and what a checkpoint contains.

use super::Task;
use super::batch::Sentences;
use super::model::Classifier;
use super::options::Options;
use crate::measure::{self, Measured, Meter, Number};
use crate::memory::check_fits;
use crate::ranks::Gradients;
use crate::{Confusion, Ranks, Training};
use anyhow::{Result, ensure};
use std::time::Instant;
use tch::nn::VarStore;
use tch::{Device, Tensor, no_grad};
use tch_amp::checkpoint::Checkpoint;
use tch_amp::optim::{AdamW, Optimizer};
use tch_amp::schedule::{LinearLr, Scheduler, SequentialLr};
use tch_amp::{Autocast, GradScaler};

/// The column of the rate.
const SENTENCES_PER_SECOND: &str = "sentences_per_second";

const MAX_NORM: f64 = 1.0;
const WEIGHT_DECAY: f64 = 0.01;
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
    pub(super) region: Autocast,
    optimizer: Optimizer,
    pub(super) scaler: GradScaler,
    schedule: Scheduler,
    /// Averages the gradients if there are several ranks.
    gradients: Gradients,
    train: Sentences,
    pub(super) held_out: Sentences,
    pub(super) test: Sentences,
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
        let (amp, seed, steps) = (options.common.amp, options.common.seed, options.common.steps);
        let (rows, size) = (options.rows, ranks.size());
        ensure!(rows.is_multiple_of(size), "--rows {rows} cannot be divided among {size} ranks");
        let sentences = |part| Sentences::new(part, &task.tokens, options.length, seed);
        let train = sentences(&task.data.train)?;
        let labels = task.data.labels.len();
        let tokens = train.longest() as f64 * (rows / size) as f64;
        check_fits(task.config.least_bytes(tokens), device)?;

        let best = VarStore::new(device);
        let _best = Classifier::new(&best.root(), task.config, labels, options.dropout);
        tch::manual_seed(seed);
        let mut vs = VarStore::new(device);
        let model = Classifier::new(&vs.root(), task.config, labels, options.dropout);
        task.load_weights(&mut vs)?;
        // From here on the ranks draw different numbers, for dropout.
        ranks.manual_seed(seed);
        let gradients = ranks.gradients(&vs)?;
        let mut optimizer =
            AdamW { weight_decay: WEIGHT_DECAY, ..Default::default() }.build(&vs, options.lr)?;
        optimizer.assign_group(1, &NO_DECAY)?;
        optimizer.set_weight_decay_group(1, 0.0)?;
        let warm_up = (steps / 10).max(1);
        let total_iters = steps.saturating_sub(warm_up).max(1);
        let fall = LinearLr { start_factor: 1.0, end_factor: 0.0, total_iters };
        let rise = LinearLr { start_factor: 0.01, total_iters: warm_up, ..Default::default() };
        let schedule = SequentialLr::new(rise).then_at(warm_up, fall).build(&mut optimizer)?;
        let mut scaler = amp.scaler(device)?;
        scaler.name_parameters(&vs)?;
        Ok(Self {
            options,
            ranks,
            device,
            vs,
            best,
            best_of: None,
            model,
            region: amp.region(device),
            optimizer,
            scaler,
            schedule,
            gradients,
            train,
            held_out: sentences(&task.data.held_out)?,
            test: sentences(&task.data.test)?,
            meter: Meter::new(amp, SENTENCES_PER_SECOND),
        })
    }

    /// Classifies all these sentences. Each rank takes a part, and all of them get all logits.
    pub fn classify(&self, sentences: &Sentences) -> Result<Confusion> {
        let (mut logits, mut labels) = (Vec::new(), Vec::new());
        for batch in sentences.in_order(self.options.rows) {
            let part = batch.map(|tensor| self.ranks.share(tensor)).to(self.device);
            let part = no_grad(|| self.region.run(|| self.model.logits(&part, false)))?;
            logits.push(self.ranks.gather(&part)?);
            labels.push(batch.labels);
        }
        // The last batch has some sentences twice.
        let count = sentences.len() as i64;
        let logits = Tensor::cat(&logits, 0).narrow(0, 0, count).to_device(Device::Cpu);
        let labels = Tensor::cat(&labels, 0).narrow(0, 0, count);
        Confusion::new(&logits, &labels)
    }

    /// Keeps a copy of the weights if they are better than all before.
    fn keep_best(&mut self, accuracy: f64, step: u64) -> Result<()> {
        if self.best_of.is_none_or(|(best, _)| accuracy > best) {
            self.best.copy(&self.vs)?;
            self.best_of = Some((accuracy, step));
        }
        Ok(())
    }

    /// Takes the best weights, and returns their accuracy and after how many steps they were.
    pub fn reload_best(&mut self) -> Result<Option<(f64, u64)>> {
        if self.best_of.is_some() {
            self.vs.copy(&self.best)?;
        }
        Ok(self.best_of)
    }
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
    ];

    /// One training step: the clipped gradients of a batch, a step of the optimizer and of the schedule. Non-finite
    /// gradients change neither, and lower the scale of fp16. Nothing synchronizes.
    fn step(&mut self) -> Result<Measured> {
        let lr = self.optimizer.lr(0)?;
        let batch = self.train.next(self.options.rows).map(|tensor| self.ranks.share(tensor));
        let batch = batch.to(self.device);
        self.optimizer.zero_grad()?;
        // Each rank has equally many sentences, so the mean of the ranks is that of the batch.
        let loss = self.gradients.forward(|| {
            self.region
                .run(|| self.model.logits(&batch, true).cross_entropy_for_logits(&batch.labels))
        })??;
        self.gradients.backward(&mut self.scaler, &loss)?;
        let outcome = self.scaler.step_clip_norm(&mut self.optimizer, MAX_NORM)?;
        self.scaler.update()?;
        let norm = outcome.total_norm().map(Tensor::shallow_clone);
        self.schedule.step(&mut self.optimizer, &outcome)?;
        self.meter.count += self.options.rows;
        Ok(Measured { loss: loss.detach(), norm, lr })
    }

    fn read(&mut self, measured: &Measured, since: Instant) -> Result<Vec<Number>> {
        self.meter.read(measured, since, &self.scaler, self.ranks)
    }

    /// Keeps the weights if they are the best so far on held-out sentences.
    fn evaluate(&mut self, step: u64) -> Result<Vec<Number>> {
        let confusion = self.classify(&self.held_out)?;
        let accuracy = confusion.accuracy();
        self.keep_best(accuracy, step)?;
        Ok(vec![(measure::HELD_OUT, confusion.loss), (measure::ACCURACY, accuracy)])
    }

    fn words(&self, numbers: &[Number]) -> String {
        self.meter.words(numbers)
    }

    fn save(&mut self, checkpoint: &mut Checkpoint) -> Result<()> {
        checkpoint.add_model("model", &self.vs)?;
        checkpoint.add_model("best", &self.best)?;
        checkpoint.add_optimizer("optimizer", &mut self.optimizer)?;
        checkpoint.add_scaler("scaler", &self.scaler)?;
        checkpoint.add("schedule", &mut self.schedule)?;
        self.ranks.add_rngs(checkpoint, self.device)?;
        checkpoint.add_value("best_of", &self.best_of)?;
        checkpoint.add_value("position", &self.train.position)?;
        Ok(())
    }

    fn restore(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        let position = checkpoint.value("position")?;
        let best_of = checkpoint.value("best_of")?;
        let restore = checkpoint
            .restore()
            .model("model", &self.vs)
            .model("best", &self.best)
            .optimizer("optimizer", &mut self.optimizer)
            .scaler("scaler", &mut self.scaler)
            .add("schedule", &mut self.schedule);
        self.ranks.rngs(restore, checkpoint, self.device).apply()?;
        (self.train.position, self.best_of) = (position, best_of);
        Ok(())
    }

    fn taken(&mut self) -> Result<u64> {
        Ok(self.schedule.steps())
    }

    fn weights(&self) -> &VarStore {
        &self.vs
    }
}

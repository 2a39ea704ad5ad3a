//! The model with everything that trains it, the training step, and what a checkpoint contains.

use super::Task;
use super::batch::Sentences;
use super::model::Classifier;
use super::options::Options;
use crate::recipe::Ranks;
use crate::recipe::log::{self, Row};
use crate::recipe::memory::check_fits;
use crate::recipe::ranks::Gradients;
use anyhow::{Result, ensure};
use tch::nn::VarStore;
use tch::{Device, Tensor};
use tch_amp::checkpoint::Checkpoint;
use tch_amp::optim::{AdamW, Optimizer};
use tch_amp::schedule::{LinearLr, Scheduler, SequentialLr};
use tch_amp::{Autocast, GradScaler};

const MAX_NORM: f64 = 1.0;
const WEIGHT_DECAY: f64 = 0.01;
/// The parameters that are not pulled towards zero, by their names.
const NO_DECAY: [&str; 2] = ["*.bias", "*LayerNorm.weight"];
/// The random numbers of the CPU, and of the GPU if the model is there, of each rank.
const RNG: &str = "rng";
const GPU_RNG: &str = "gpu_rng";

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
    /// How many sentences were read since the last line of the log.
    pub(super) read: usize,
}

/// Numbers of a step, on the device.
pub struct Measured {
    /// Of this rank.
    pub loss: Tensor,
    /// Of the averaged gradients.
    pub norm: Option<Tensor>,
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
        let mut optimizer = AdamW::default().weight_decay(WEIGHT_DECAY).build(&vs, options.lr)?;
        optimizer.assign_group(1, &NO_DECAY)?;
        optimizer.set_weight_decay_group(1, 0.0)?;
        let warm_up = (steps / 10).max(1);
        let fall = LinearLr::default().start_factor(1.0).end_factor(0.0);
        let fall = fall.total_iters(steps.saturating_sub(warm_up).max(1));
        let schedule =
            SequentialLr::new(LinearLr::default().start_factor(0.01).total_iters(warm_up))
                .then_at(warm_up, fall)
                .build(&mut optimizer)?;
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
            read: 0,
        })
    }

    /// One training step: the clipped gradients of a batch, a step of the optimizer and of the schedule. Non-finite
    /// gradients change neither, and lower the scale of fp16. Nothing synchronizes.
    pub fn step(&mut self) -> Result<Measured> {
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
        self.schedule.step(&mut self.optimizer, outcome)?;
        self.read += self.options.rows;
        Ok(Measured { loss: loss.detach(), norm })
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

    /// Keeps a copy of the weights if they are better than all before.
    pub fn keep_best(&mut self, accuracy: f64, step: u64) -> Result<()> {
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

    /// The state after a step, which all ranks make together. That of the first rank is complete.
    pub fn checkpoint(&mut self, rows: &[Row]) -> Result<Checkpoint> {
        let mut checkpoint = Checkpoint::new();
        checkpoint.add_model("model", &self.vs)?;
        checkpoint.add_model("best", &self.best)?;
        checkpoint.add_optimizer("optimizer", &mut self.optimizer)?;
        checkpoint.add_scaler("scaler", &self.scaler)?;
        checkpoint.add("schedule", &mut self.schedule)?;
        self.ranks.add_rngs(&mut checkpoint, RNG, Device::Cpu)?;
        if self.device.is_cuda() {
            self.ranks.add_rngs(&mut checkpoint, GPU_RNG, self.device)?;
        }
        checkpoint.add_value("best_of", &self.best_of)?;
        checkpoint.add_value("position", &self.train.position)?;
        log::save(rows, &mut checkpoint)?;
        Ok(checkpoint)
    }

    /// Takes over the state of a checkpoint, and returns its lines of the log.
    pub fn restore(&mut self, checkpoint: &Checkpoint) -> Result<Vec<Row>> {
        let position = checkpoint.value("position")?;
        let best_of = checkpoint.value("best_of")?;
        let rows = log::load(checkpoint)?;
        let restore = checkpoint
            .restore()
            .model("model", &self.vs)
            .model("best", &self.best)
            .optimizer("optimizer", &mut self.optimizer)
            .scaler("scaler", &mut self.scaler)
            .add("schedule", &mut self.schedule);
        let restore = self.ranks.rngs(restore, RNG, Device::Cpu);
        // A run that goes on on another kind of device has other random numbers there in any case.
        let has_gpu = self.device.is_cuda() && checkpoint.contains(GPU_RNG);
        let restore =
            if has_gpu { self.ranks.rngs(restore, GPU_RNG, self.device) } else { restore };
        restore.apply()?;
        (self.train.position, self.best_of) = (position, best_of);
        Ok(rows)
    }
}

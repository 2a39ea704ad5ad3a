//! The model with everything that trains it: the training step, and what a checkpoint contains. The random numbers of
//! libtorch are not part of it, because only the first weights are drawn from them.

use super::batch::{Batch, Set};
use super::data::Data;
use super::model::{self, Config, Net};
use super::options::Options;
use super::reader::Reader;
use crate::measure::{self, Measured, Meter, Number};
use crate::memory::check_fits;
use crate::ranks::Gradients;
use crate::{Ranks, Region, Training, training};
use anyhow::Result;
use std::mem;
use std::time::Instant;
use tch::nn::VarStore;
use tch::{Device, Tensor};
use tch_amp::average::{AveragedWeights, Swa};
use tch_amp::checkpoint::{Checkpoint, Stateful};
use tch_amp::insight::BudgetReport;
use tch_amp::optim::{Optimizer, Sgd};
use tch_amp::schedule::{
    ConstantLr, CosineAnnealingLr, LinearLr, Schedule, Scheduler, SequentialLr,
};
use tch_amp::{Autocast, GradScaler};

/// The column of the rate.
pub const IMAGES_PER_SECOND: &str = "images_per_second";

const WEIGHT_DECAY: f64 = 5e-4;
/// The parameters that are not pulled towards zero, by their names.
const NO_DECAY: [&str; 2] = ["*.bias", "*.norm.weight"];
/// To which share of the largest learning rate it falls, for the steps whose weights are averaged.
const LAST_LR: f64 = 0.2;

fn optimizer(vs: &VarStore, options: &Options) -> tch_amp::Result<Optimizer> {
    let sgd =
        Sgd { momentum: 0.9, nesterov: true, weight_decay: WEIGHT_DECAY, ..Default::default() };
    let mut optimizer = sgd.build(vs, options.lr)?;
    optimizer.assign_group(1, &NO_DECAY)?;
    optimizer.set_weight_decay_group(1, 0.0)?;
    Ok(optimizer)
}

/// The model and everything that trains it.
pub struct Trainer<'a> {
    pub(super) options: &'a Options,
    pub(super) set: &'a Set,
    pub(super) vs: VarStore,
    pub(super) network: Network<'a>,
    pub(super) optimizer: Optimizer,
    pub(super) scaler: GradScaler,
    pub(super) schedule: Scheduler,
    pub(super) swa: AveragedWeights,
    /// Averages the gradients if there are several ranks.
    gradients: Gradients,
    pub(super) reader: Reader,
    meter: Meter,
}

/// The model in its precision.
pub struct Network<'a> {
    pub(super) ranks: &'a Ranks,
    pub(super) model: Net,
    region: Region,
}

impl Network<'_> {
    /// The logits of a batch.
    pub fn logits(&self, batch: &Batch, train: bool) -> tch_amp::Result<Tensor> {
        self.region.run(|| self.model.logits(&batch.images, train))
    }
}

impl<'a> Trainer<'a> {
    /// Makes a model with random weights, the same ones for the same seed.
    pub fn new(
        options: &'a Options,
        data: &Data,
        set: &'a Set,
        device: Device,
        ranks: &'a Ranks,
    ) -> Result<Self> {
        let (amp, seed) = (options.common.amp, options.common.seed);
        let precision = amp.on(device)?;
        let meter = Meter::new(amp, IMAGES_PER_SECOND).with_memory(device);
        options.check_ranks(ranks.size())?;
        tch::manual_seed(seed);
        let vs = VarStore::new(device);
        let Options { width, stages, blocks, sync_batch_norm: synced, .. } = *options;
        let config = Config { width, stages, blocks, classes: data.labels.len() as i64, synced };
        check_fits(config.least_bytes(options.rows / ranks.size(), data.size), device)?;
        let model = Net::new(&vs.root(), config, ranks);
        if !options.channels_first {
            model::make_channels_last(&vs);
        }
        let gradients = ranks.gradients(&vs)?;
        let mut optimizer = optimizer(&vs, options)?;
        let schedule = schedule(options).build(&mut optimizer)?;
        let mut scaler = precision.skipping_scaler()?;
        scaler.name_parameters(&vs)?;
        let swa = Swa::default().build(&vs)?;
        let mirrors = options.mirror || data.has_mirror_images;
        Ok(Self {
            options,
            set,
            vs,
            network: Network {
                ranks,
                model,
                region: Region::new(precision.region(), &options.common),
            },
            optimizer,
            scaler,
            schedule,
            swa,
            gradients,
            reader: Reader::new(&set.train, mirrors, seed),
            meter,
        })
    }

    /// Tests that a step in half precision differs from one in f32 by rounding alone.
    pub fn budget(&mut self) -> Result<BudgetReport> {
        let empty = VarStore::new(self.vs.device());
        let vs = mem::replace(&mut self.vs, empty);
        let (options, position, region) =
            (self.options, self.reader.position, self.network.region.autocast());
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

    /// The averages of the weights.
    pub fn averages(&mut self) -> &mut AveragedWeights {
        &mut self.swa
    }

    /// The states of a checkpoint.
    fn parts(&mut self) -> [(&'static str, &mut dyn Stateful); 5] {
        [
            ("model", &mut self.vs),
            ("optimizer", &mut self.optimizer),
            ("scaler", &mut self.scaler),
            ("schedule", &mut self.schedule),
            ("swa", &mut self.swa),
        ]
    }
}

impl Training for Trainer<'_> {
    type Measured = Measured;

    const COLUMNS: &'static [&'static str] = &[
        measure::LOSS,
        measure::HELD_OUT,
        measure::ACCURACY,
        measure::LEARNING_RATE,
        measure::SCALE,
        IMAGES_PER_SECOND,
        measure::PEAK_MEMORY,
    ];

    fn tune(&mut self) -> Result<Option<String>> {
        let Network { ranks, model, region } = &mut self.network;
        if self.options.sync_batch_norm && ranks.size() > 1 {
            return Ok(None);
        }
        let (reader, set, rows) = (&mut self.reader, self.set, self.options.rows);
        region.tune(ranks, &self.vs, &self.scaler, || {
            let position = reader.position;
            let views = reader.next(rows / ranks.size());
            reader.position = position;
            let batch = set.train.take(&views);
            Ok(move |region: Autocast| {
                let logits = region.run(|| model.logits(&batch.images, true))?;
                Ok(logits.cross_entropy_for_logits(&batch.labels))
            })
        })
    }

    /// One training step on an augmented batch: a step of the optimizer and of the schedule, and towards the end of the
    /// training also one of the averages. Non-finite gradients change none of these, and lower the scale of fp16.
    /// Nothing synchronizes.
    fn step(&mut self) -> Result<Measured> {
        let rows = self.options.rows;
        let lr = self.optimizer.lr(0)?;
        let (rank, size) = (self.network.ranks.rank(), self.network.ranks.size());
        let views: Vec<_> = self.reader.next(rows).into_iter().skip(rank).step_by(size).collect();
        let batch = self.set.train.take(&views);
        self.optimizer.zero_grad()?;
        // Each rank has equally many images, so the mean of the ranks is that of the batch.
        let loss = self.gradients.forward(|| {
            let logits = self.network.logits(&batch, true)?;
            tch_amp::Result::Ok(logits.cross_entropy_for_logits(&batch.labels))
        })?;
        self.gradients.backward(&mut self.scaler, &loss)?;
        let outcome = self.scaler.step(&mut self.optimizer)?;
        self.scaler.update()?;
        if averages_after(self.options, self.reader.position / rows as u64) {
            self.swa.update(&outcome)?;
        }
        self.schedule.step(&mut self.optimizer, &outcome)?;
        self.meter.count += rows;
        Ok(Measured { loss: loss.detach(), norm: None, lr, sent: None })
    }

    fn read(&mut self, measured: &Measured, since: Instant) -> Result<Vec<Number>> {
        self.meter.read(measured, since, &self.scaler, self.network.ranks)
    }

    /// Classifies the held-out images with the weights of the step, not with the averaged ones.
    fn evaluate(&mut self, _step: u64) -> Result<Vec<Number>> {
        self.network.ranks.same_buffers(&self.vs)?;
        let confusion = self.network.classify(&self.set.held_out, self.options.rows)?;
        Ok(vec![(measure::HELD_OUT, confusion.loss), (measure::ACCURACY, confusion.accuracy())])
    }

    fn words(&self, numbers: &[Number]) -> String {
        self.meter.words(numbers)
    }

    /// The statistics of batch normalization are those of the first rank, with which all ranks go on.
    fn save(&mut self, checkpoint: &mut Checkpoint) -> Result<()> {
        checkpoint.add_all(self.parts())?;
        self.network.region.save(checkpoint)?;
        checkpoint.add_value("position", &self.reader.position)?;
        Ok(())
    }

    fn restore(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        let position = checkpoint.value("position")?;
        checkpoint.restore().add_all(self.parts()).apply()?;
        self.network.region.restore(checkpoint)?;
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

/// The steps of the warm-up, and all steps before those whose weights are averaged.
pub fn phases(options: &Options) -> (u64, u64) {
    let steps = options.common.steps;
    let warm_up = (steps / 10).max(1);
    (warm_up, ((steps as f64 * options.swa_from) as u64).max(warm_up + 1))
}

/// Whether the weights after this step are averaged: those of every few steps, and the last ones.
pub fn averages_after(options: &Options, step: u64) -> bool {
    let (_, before) = phases(options);
    let is_due = step > before && (step - before).is_multiple_of(options.swa_every);
    is_due || step == options.common.steps
}

/// A warm-up, half a cosine, and a constant learning rate while the weights are averaged.
fn schedule(options: &Options) -> Schedule {
    let (warm_up, before) = phases(options);
    let rise = LinearLr { start_factor: 0.1, total_iters: warm_up, ..Default::default() };
    let fall = CosineAnnealingLr { t_max: before - warm_up, eta_min: LAST_LR * options.lr };
    let last = ConstantLr { factor: LAST_LR, total_iters: u64::MAX };
    SequentialLr::new(rise).then_at(warm_up, fall).then_at(before, last).into()
}

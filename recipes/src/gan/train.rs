//! The two networks with everything that trains them: the training step, and what a checkpoint contains.

use super::bce::bce;
use super::measure;
use super::options::Options;
use super::ring;
use crate::measure::Number;
use crate::{Ranks, Training};
use anyhow::Result;
use std::time::Instant;
use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Reduction, Tensor, no_grad};
use tch_amp::Amp;
use tch_amp::checkpoint::{Checkpoint, Stateful};
use tch_amp::optim::{Adam, Optimizer};
use tch_amp::scaler::{GradScalerConfig, PerLossScalers, StepCounter};
use tch_amp::{Autocast, GradScaler};

const BATCH: i64 = 256;
/// The random numbers from which the generator makes a point.
const NOISE: i64 = 8;
const WIDTH: i64 = 64;
const LR: f64 = 1e-3;
/// The points by which the generator is judged.
const JUDGED: i64 = 8 * BATCH;

/// A network with its optimizer.
pub struct Player {
    pub vs: VarStore,
    network: nn::Sequential,
    optimizer: Optimizer,
}

impl Player {
    fn new(device: Device, inputs: i64, outputs: i64) -> Result<Self> {
        let vs = VarStore::new(device);
        let network = network(&vs, inputs, outputs);
        let optimizer = Adam { betas: (0.5, 0.99), ..Default::default() }.build(&vs, LR)?;
        Ok(Self { vs, network, optimizer })
    }
}

/// Two hidden layers.
fn network(vs: &VarStore, inputs: i64, outputs: i64) -> nn::Sequential {
    let root = vs.root();
    nn::seq()
        .add(nn::linear(&root / "first", inputs, WIDTH, Default::default()))
        .add_fn(Tensor::leaky_relu)
        .add(nn::linear(&root / "second", WIDTH, WIDTH, Default::default()))
        .add_fn(Tensor::leaky_relu)
        .add(nn::linear(&root / "out", WIDTH, outputs, Default::default()))
}

/// The losses of a step, on the device.
pub struct Losses {
    pub discriminator: Tensor,
    pub verdict: Tensor,
    pub distance: Tensor,
}

/// Both networks and everything that trains them.
pub struct Trainer {
    amp: Amp,
    device: Device,
    region: Autocast,
    centres: Tensor,
    pub generator: Player,
    discriminator: Player,
    scaler: GradScaler,
    scalers: PerLossScalers,
    taken: StepCounter,
}

impl Trainer {
    /// Makes networks with random weights, the same ones for the same seed.
    pub fn new(options: &Options, device: Device) -> Result<Self> {
        let amp = options.common.amp;
        let precision = amp.on(device)?;
        tch::manual_seed(options.common.seed);
        // bf16 has the range of f32 and needs no scale; the loop is the same.
        let config = GradScalerConfig { enabled: precision.needs_scaling(), ..Default::default() };
        Ok(Self {
            amp,
            device,
            region: precision.region(),
            centres: ring::centres(device),
            generator: Player::new(device, NOISE, 2)?,
            discriminator: Player::new(device, 2, 1)?,
            scaler: config.build(device)?,
            scalers: PerLossScalers::with_configs(device, &[config; 2])?,
            taken: StepCounter::default(),
        })
    }

    /// Steps the discriminator. Its loss must not reach the generator, hence `detach`. Zeroing removes the scaled
    /// gradients that the generator's losses have left in the discriminator.
    fn step_discriminator(&mut self, reals: &Tensor, fakes: &Tensor) -> Result<Tensor> {
        let Player { network, optimizer, .. } = &mut self.discriminator;
        optimizer.zero_grad()?;
        let loss = self.region.run(|| {
            bce(&network.forward(reals), 1.0) + bce(&network.forward(&fakes.detach()), 0.0)
        })?;
        self.scaler.backward(&loss)?;
        self.scaler.step(optimizer)?;
        self.scaler.update()?;
        Ok(loss)
    }

    /// Steps the generator. Its losses have a region of their own, because the discriminator's weights have changed
    /// since the last one.
    fn step_generator(&mut self, reals: &Tensor, fakes: &Tensor) -> Result<(Tensor, Tensor)> {
        let (verdict, distance) = self.region.run(|| {
            let verdict = bce(&self.discriminator.network.forward(fakes), 1.0);
            let (fakes, reals) = (ring::moments(fakes), ring::moments(reals));
            (verdict, fakes.mse_loss(&reals, Reduction::Mean))
        })?;
        let optimizer = &mut self.generator.optimizer;
        optimizer.zero_grad()?;
        // Both losses have the graph of the fakes in common: keep it for the second.
        self.scalers.backward_retain_graph(0, &verdict, optimizer)?;
        self.scalers.backward(1, &distance, optimizer)?;
        self.taken.record(&self.scalers.step(optimizer)?);
        self.scalers.update()?;
        Ok((verdict, distance))
    }

    /// Returns points of the generator for a metric, which needs a region, no scaler, and f32.
    pub fn points(&self) -> Result<Tensor> {
        let points =
            no_grad(|| self.region.run(|| self.generator.network.forward(&self.noise(JUDGED))))?;
        Ok(points.to_kind(Kind::Float))
    }

    fn noise(&self, count: i64) -> Tensor {
        Tensor::randn([count, NOISE], (Kind::Float, self.device))
    }

    /// The states of a checkpoint.
    fn parts(&mut self) -> [(&'static str, &mut dyn Stateful); 6] {
        [
            ("generator", &mut self.generator.vs),
            ("discriminator", &mut self.discriminator.vs),
            ("generator_optimizer", &mut self.generator.optimizer),
            ("discriminator_optimizer", &mut self.discriminator.optimizer),
            ("generator_scalers", &mut self.scalers),
            ("discriminator_scaler", &mut self.scaler),
        ]
    }
}

impl Training for Trainer {
    type Measured = Losses;

    const COLUMNS: &'static [&'static str] = &measure::COLUMNS;

    /// One step of both networks. Nothing synchronizes.
    fn step(&mut self) -> Result<Losses> {
        // One forward pass of the generator serves both networks.
        let reals = ring::reals(&self.centres, BATCH);
        let fakes = self.region.run(|| self.generator.network.forward(&self.noise(BATCH)))?;
        let discriminator = self.step_discriminator(&reals, &fakes)?;
        let (verdict, distance) = self.step_generator(&reals, &fakes)?;
        Ok(Losses { discriminator, verdict, distance })
    }

    fn read(&mut self, losses: &Losses, _since: Instant) -> Result<Vec<Number>> {
        let Losses { discriminator, verdict, distance } = losses;
        let (covered, close) = ring::coverage(&self.points()?, &self.centres);
        let mut numbers = vec![
            (measure::DISCRIMINATOR, discriminator.double_value(&[])),
            (measure::VERDICT, verdict.double_value(&[])),
            (measure::DISTANCE, distance.double_value(&[])),
            (measure::COVERED, covered),
            (measure::CLOSE, close),
        ];
        if self.amp == Amp::Fp16 {
            let of_generator = [self.scalers.get_scale(0)?, self.scalers.get_scale(1)?];
            let scales = [self.scaler.get_scale()?, of_generator[0], of_generator[1]];
            numbers.extend(measure::SCALES.into_iter().zip(scales));
        }
        Ok(numbers)
    }

    fn words(&self, numbers: &[Number]) -> String {
        measure::words(numbers)
    }

    fn save(&mut self, checkpoint: &mut Checkpoint) -> Result<()> {
        checkpoint.add_all(self.parts())?;
        Ranks::alone().add_rngs(checkpoint, self.device)?;
        checkpoint.add_value("taken", &self.taken.count()?)?;
        Ok(())
    }

    fn restore(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        let taken = checkpoint.value("taken")?;
        let device = self.device;
        let restore = checkpoint.restore().add_all(self.parts());
        Ranks::alone().rngs(restore, checkpoint, device).apply()?;
        self.taken = StepCounter::starting_at(taken);
        Ok(())
    }

    /// How many steps of the generator were taken.
    fn taken(&mut self) -> Result<u64> {
        Ok(self.taken.count()?)
    }

    fn weights(&self) -> &VarStore {
        &self.generator.vs
    }
}

//! The iterations of the training benchmarks.

use tch::nn::VarStore;
use tch::{Device, Tensor};
use tch_amp::checkpoint::Checkpoint;
use tch_amp::insight::Tuner;
use tch_amp::optim::{AdamW, MasterWeights, Optimizer};
use tch_amp::policy::KeepF32;
use tch_amp::scaler::GradScalerConfig;
use tch_amp::{Autocast, GradScaler, Policy};

use crate::common::nanoseconds;
use crate::models::{Batch, Model, model};

/// Forward pass, backward pass, and optimizer with scaler.
pub const PHASES: usize = 3;

/// A model that is trained on one batch in a region.
pub struct Training {
    vs: VarStore,
    model: Model,
    batch: Batch,
    region: Autocast,
    /// The norm to which gradients are clipped.
    pub max_norm: Option<f64>,
    optimizer: Optimizer,
    scaler: GradScaler,
}

impl Training {
    /// A model with these weights on the device that the region is for. Its scaler is disabled unless it `scales`.
    pub fn new(
        name: &str,
        weights: &Checkpoint,
        device: Device,
        region: Autocast,
        scales: bool,
    ) -> Self {
        let vs = VarStore::new(device);
        let model = model(name, &vs.root());
        weights.restore().add("model", &vs).apply().unwrap();
        let optimizer = AdamW::default().build(&vs, 1e-4).unwrap();
        let config = GradScalerConfig { enabled: scales, ..Default::default() };
        let scaler = config.build(device).unwrap();
        tch::manual_seed(1);
        let batch = model.batch.batch(device);
        Self { vs, model, batch, region, max_norm: None, optimizer, scaler }
    }

    /// The same with weights in bf16, but for norms and embeddings, and their values in f32 in the optimizer.
    #[allow(dead_code, reason = "the benchmark on a GPU does not measure it")]
    pub fn with_masters(name: &str, weights: &Checkpoint, region: Autocast) -> Self {
        let mut it = Self::new(name, weights, Device::Cpu, region, true);
        let keep = KeepF32::NormsAnd(&["embedding.*", "places.*"]);
        Policy::BF16.cast_variables(&mut it.vs, keep).unwrap();
        let adamw = AdamW::default().master_weights(MasterWeights::Float);
        it.optimizer = adamw.build(&it.vs, 1e-4).unwrap();
        it
    }

    /// A new training with the plan that is measured for this model and its region, which is printed.
    pub fn tuned(self, name: &str, weights: &Checkpoint) -> Self {
        let Self { vs, model, batch, scaler, region, .. } = self;
        let loss = |region: Autocast| region.run(|| (model.loss)(&batch));
        let tuning = Tuner::default().tune(&vs, &region, &scaler, loss).unwrap();
        println!("{tuning}");
        let planned = region.plan(&tuning.plan).unwrap();
        Self::new(name, weights, vs.device(), planned, tuning.plan.dtype.is_some())
    }

    /// Returns the loss, and the nanoseconds of the forward pass, the backward pass, and the optimizer with the scaler.
    pub fn iterate(&mut self) -> (Tensor, [f64; PHASES]) {
        let mut loss = Tensor::new();
        let forward = nanoseconds(|| {
            self.optimizer.zero_grad().unwrap();
            loss = self.region.run(|| (self.model.loss)(&self.batch)).unwrap();
        });
        let mut scaled = Tensor::new();
        let scale = nanoseconds(|| scaled = self.scaler.scale(&loss).unwrap());
        let backward = nanoseconds(|| scaled.backward());
        let step = nanoseconds(|| {
            drop(match self.max_norm {
                None => self.scaler.step(&mut self.optimizer).unwrap(),
                Some(norm) => self.scaler.step_clip_norm(&mut self.optimizer, norm).unwrap(),
            });
            self.scaler.update().unwrap();
        });
        let optimizer = scale + step;
        (loss, [forward, backward, optimizer])
    }
}

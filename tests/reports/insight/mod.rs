//! Explanations of skipped steps: planted overflows whose operator and part of the model are known. The health of the
//! loss scale: counts of exponents and histories of steps.

mod audit;
mod blame;
mod contexts;
mod counts;
mod health;
mod history;
mod lean;
mod operators;
mod own_arithmetic;
mod page;
mod recorder;
mod report_casts;
mod report_flops;
mod report_oracle;
mod report_times;
mod restored;
mod saved;
mod scales;
mod skipped;
mod tools;
mod tune;
mod written;

use std::sync::{Mutex, MutexGuard, PoisonError};

use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::insight::{Explanation, Tracer};
use tch_amp::scaler::GradScalerConfig;
use tch_amp::{Autocast, GradScaler};

/// The random number generator and autocast's cache, which tests share: the end of any thread's region clears the cache.
static RANDOM: Mutex<()> = Mutex::new(());

/// A linear layer in `layers.0`, what is planted, and a linear layer in `layers.1`.
pub(crate) struct Model {
    pub(crate) vs: VarStore,
    first: nn::Linear,
    last: nn::Linear,
    _alone: MutexGuard<'static, ()>,
}

impl Model {
    pub(crate) fn new() -> Self {
        let alone = alone();
        tch::manual_seed(0);
        let vs = VarStore::new(Device::Cpu);
        let layers = vs.root() / "layers";
        let first = nn::linear(&layers / 0, 4, 4, Default::default());
        let last = nn::linear(&layers / 1, 4, 4, Default::default());
        Self { vs, first, last, _alone: alone }
    }

    pub(crate) fn with_batch() -> (Self, Tensor) {
        (Self::new(), batch())
    }

    pub(crate) fn loss(&self, x: &Tensor, planted: impl Fn(&Tensor) -> Tensor) -> Tensor {
        planted(&x.apply(&self.first)).apply(&self.last).to_kind(Kind::Float).square().mean(None)
    }
}

/// Keeps other tests from random numbers and from opening regions until it is dropped.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    RANDOM.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn batch() -> Tensor {
    Tensor::arange(8, (Kind::Float, Device::Cpu)).reshape([2, 4]) / 8 + 0.5
}

/// A scaler on the CPU with this scale.
pub(crate) fn scaler(init_scale: f64) -> GradScaler {
    GradScalerConfig { init_scale, ..Default::default() }.build(Device::Cpu).unwrap()
}

/// A region on the CPU, which is off in f32.
pub(crate) fn region(kind: Kind) -> Autocast {
    Autocast::new(Device::Cpu).dtype(kind).enabled(kind != Kind::Float)
}

/// Explains an iteration in `kind` at a scale.
pub(crate) fn explain(
    vs: &VarStore,
    kind: Kind,
    scale: f64,
    loss: impl Fn() -> Tensor,
) -> Explanation {
    let scaler = scaler(scale);
    let mut tracer = Tracer::new(vs).unwrap();
    tracer.begin(&scaler).unwrap();
    let explanation = tracer.explain(&scaler, || region(kind).run(&loss)).unwrap();
    explanation.expect("the limit is not reached")
}

/// Explains an iteration in f32 of a model with something planted.
pub(crate) fn explain_planted(planted: impl Fn(&Tensor) -> Tensor) -> Explanation {
    let (model, x) = Model::with_batch();
    explain(&model.vs, Kind::Float, 1.0, || model.loss(&x, &planted))
}

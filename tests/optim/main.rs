//! The rules of the fused optimizers, one test each. Random programs are compared with PyTorch in `optim_programs/`.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
mod common;

mod adam_fp16;
mod build;
mod clip;
mod f32_gradients;
mod groups;
mod lost_updates;
mod masters;
mod muon;
mod numbers;
mod refused;
mod replaced;
mod scaled;
mod skipped;
mod stale;
mod state;

use tch::{Device, Kind, Tensor};
use tch_amp::optim::{
    Adagrad, Adam, AdamW, Algorithm, IntoParameters, Lion, Muon, Optimizer, RmsProp, Sgd,
};

/// One of each algorithm, with all the options that affect its arithmetic.
fn algorithms() -> Vec<Algorithm> {
    let adam = Adam::default().weight_decay(0.1);
    let sgd = Sgd::default().momentum(0.9).weight_decay(0.1);
    let rmsprop = RmsProp::default().alpha(0.9).weight_decay(0.1);
    let lion = Lion::default().weight_decay(0.1);
    vec![
        AdamW::default().into(),
        AdamW::default().amsgrad(true).maximize(true).betas((0.4, 0.9)).into(),
        adam.into(),
        adam.amsgrad(true).into(),
        Sgd::default().weight_decay(0.1).maximize(true).into(),
        sgd.into(),
        sgd.dampening(0.3).into(),
        sgd.nesterov(true).into(),
        Adagrad::default().initial_accumulator_value(0.5).lr_decay(0.1).into(),
        rmsprop.into(),
        rmsprop.momentum(0.9).maximize(true).into(),
        rmsprop.centered(true).into(),
        rmsprop.centered(true).momentum(0.5).weight_decay(0.0).into(),
        lion.into(),
        lion.betas((0.5, 0.75)).maximize(true).into(),
        // Steps vectors by AdamW.
        Muon::default().adamw_lr_factor(0.5).into(),
    ]
}

fn build(algorithm: Algorithm, parameters: impl IntoParameters, lr: f64) -> Optimizer {
    algorithm.build(parameters, lr).unwrap()
}

/// Replaces the gradient of `w` with `values`.
fn set_grad(w: &Tensor, values: &[f64]) {
    w.grad().defined().then(|| w.grad().detach_().zero_());
    let factors = Tensor::from_slice(values).to_kind(w.kind()).to_device(w.device());
    let mut old = w.grad();
    if old.defined() {
        tch::no_grad(|| old.copy_(&factors.view_as(w)));
    } else {
        (w * factors.view_as(w)).sum(w.kind()).backward();
    }
}

fn to_f64(tensor: &Tensor) -> Vec<f64> {
    let plain = tensor.detach().to_device(Device::Cpu).to_kind(Kind::Double);
    Vec::try_from(plain.contiguous().view(-1)).unwrap()
}

const INF: f64 = f64::INFINITY;
const NAN: f64 = f64::NAN;

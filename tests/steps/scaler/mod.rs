//! The rules of the scaler, one test each. Random programs are compared with PyTorch in `programs/`.

mod backward_step;
mod carried;
mod gradients;
mod identity;
mod losses;
mod per_loss;
mod programs;
mod protocol;
mod scale;
mod shared;
mod shared_memory;
mod skip_only;
mod spikes;
mod state;
mod tolerance;
mod unscaled;
mod values;
mod warning;

use tch::nn::{self, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::optim::{AmpOptimizer, Sgd};
use tch_amp::scaler::{GradScalerConfig, StepOutcome};
use tch_amp::{GradScaler, Result};

use testkit::descent::Descent;
use testkit::tensors::leaf;

/// The usual options, with another scale at the beginning.
fn with_scale(init_scale: f64) -> GradScalerConfig {
    GradScalerConfig { init_scale, ..Default::default() }
}

/// A scaler with a scale of 8, with which the arithmetic of no test rounds.
fn scaler(device: Device) -> GradScaler {
    with_scale(8.0).build(device).unwrap()
}

/// A weight of three ones in a VarStore, and an SGD with a learning rate of 1.
fn model(device: Device) -> (VarStore, Tensor, nn::Optimizer) {
    let vs = VarStore::new(device);
    let w = vs.root().ones("w", &[3]);
    let opt = nn::Sgd::default().build(&vs, 1.0).unwrap();
    (vs, w, opt)
}

/// An SGD with a learning rate of 1: a fused one, or one of tch.
fn sgd(vs: &VarStore, fused: bool) -> Box<dyn AmpOptimizer> {
    match fused {
        true => Box::new(Sgd::default().build(vs, 1.0).unwrap()),
        false => Box::new(nn::Sgd::default().build(vs, 1.0).unwrap()),
    }
}

/// A loss whose gradient is `values`, one for each element of the weight.
fn loss(w: &Tensor, values: &[f64]) -> Tensor {
    let factors = Tensor::from_slice(values).to_kind(w.kind()).to_device(w.device());
    (w * factors.view_as(w)).sum(None)
}

/// A weight, its optimizer and a scaler after the backward of a loss with these gradients.
fn after_backward(device: Device, values: &[f64]) -> (VarStore, Tensor, nn::Optimizer, GradScaler) {
    let (vs, w, opt) = model(device);
    let scaler = scaler(device);
    scaler.backward(&loss(&w, values)).unwrap();
    (vs, w, opt, scaler)
}

/// The same after `unscale_`.
fn after_unscaled(device: Device, values: &[f64]) -> (VarStore, Tensor, nn::Optimizer, GradScaler) {
    let (vs, w, mut opt, mut scaler) = after_backward(device, values);
    scaler.unscale_(&mut opt).unwrap();
    (vs, w, opt, scaler)
}

/// Steps and ends the iteration.
fn step_and_update(scaler: &mut GradScaler, opt: &mut dyn AmpOptimizer) -> StepOutcome {
    let outcome = scaler.step(opt).unwrap();
    scaler.update().unwrap();
    outcome
}

/// One iteration of a new model, with or without an overflow.
pub(crate) fn iterate(scaler: &mut GradScaler, device: Device, overflow: bool) -> Result<()> {
    let (_vs, w, mut opt) = model(device);
    loss(&w, &[if overflow { INF } else { 1.0 }; 3]).backward();
    assert_eq!(scaler.step(&mut opt)?.is_skipped()?, overflow);
    scaler.update()
}

/// Drops the gradients, so that the next backward pass makes new ones.
fn drop_gradients(ws: &[Tensor]) {
    Sgd::default().build(ws, 0.0).unwrap().zero_grad().unwrap();
}

/// Rows of a table, whose gradient is sparse.
fn rows(table: &Tensor, places: &[i64]) -> Tensor {
    let places = Tensor::from_slice(places).to_device(table.device());
    Tensor::embedding(table, &places, -1, false, true)
}

const INF: f64 = f64::INFINITY;
const NAN: f64 = f64::NAN;

/// A trainable weight of ones.
fn ones(kind: Kind, device: Device) -> Tensor {
    leaf(&[1.0; 3], kind, device)
}

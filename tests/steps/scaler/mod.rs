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
use tch_amp::GradScaler;
use tch_amp::optim::AmpOptimizer;
use tch_amp::scaler::{GradScalerConfig, StepOutcome};

use testkit::descent::Descent;
use testkit::tensors::leaf;

/// A scaler with a scale of 8, with which the arithmetic of no test rounds.
fn scaler(device: Device) -> GradScaler {
    GradScalerConfig { init_scale: 8.0, ..Default::default() }.build(device).unwrap()
}

/// A weight of three ones in a VarStore, and an SGD with a learning rate of 1.
fn model(device: Device) -> (VarStore, Tensor, nn::Optimizer) {
    let vs = VarStore::new(device);
    let w = vs.root().ones("w", &[3]);
    let opt = nn::Sgd::default().build(&vs, 1.0).unwrap();
    (vs, w, opt)
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

const INF: f64 = f64::INFINITY;
const NAN: f64 = f64::NAN;

/// A trainable weight of ones.
fn ones(kind: Kind, device: Device) -> Tensor {
    leaf(&[1.0; 3], kind, device)
}

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
use tch_amp::scaler::GradScalerConfig;

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

const INF: f64 = f64::INFINITY;
const NAN: f64 = f64::NAN;

/// A trainable weight of ones.
fn ones(kind: Kind, device: Device) -> Tensor {
    leaf(&[1.0; 3], kind, device)
}

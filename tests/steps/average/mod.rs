//! Averages of weights: PyTorch's numbers, steps that are skipped, the guard that swaps them in, and saved states.

mod batch_norm;
mod numbers;
mod refused;
mod resumed;
mod swapped;

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use testkit::rng::Rng;

/// A model with one weight, `w`, and the weight.
fn model(kind: Kind, size: i64) -> (VarStore, Tensor) {
    let mut vs = VarStore::new(Device::Cpu);
    let w = vs.root().zeros("w", &[size]);
    vs.set_kind(kind);
    (vs, w)
}

fn set(w: &Tensor, values: &[f64]) {
    tch::no_grad(|| w.shallow_clone().copy_(&Tensor::from_slice(values)));
}

fn random(rng: &mut Rng, size: i64) -> Vec<f64> {
    let digits = |rng: &mut Rng| (rng.next() >> 11) as f64 / (1u64 << 53) as f64 - 0.5;
    (0..size).map(|_| digits(rng) * 2f64.powi(rng.below(12) as i32 - 6)).collect()
}

//! Tests of how often a step calls the shim. Functions that cannot fail are not counted.

use tch::{Device, Kind, Tensor};

use crate::optim::{AdamW, MasterWeights, Sgd};
use crate::{GradScaler, ffi, sys};

/// All gradients are on one device.
const DEVICES: i64 = 1;

/// Counts the points at which the shim can fail: one for each call, and one for each device whose gradients are
/// unscaled.
fn fail_points(f: impl FnOnce()) -> i64 {
    let many = 1_000_000;
    ffi::testing_fail_at(many, sys::TESTING_TORCH_ERROR);
    f();
    many - ffi::testing_fail_at(0, sys::TESTING_TORCH_ERROR)
}

fn weights(count: i64, kind: Kind) -> Vec<Tensor> {
    let one = |_| Tensor::ones([3], (kind, Device::Cpu)).set_requires_grad(true);
    (0..count).map(one).collect()
}

fn backward(scaler: &GradScaler, weights: &[Tensor]) {
    let loss: Tensor = weights.iter().map(|w| w.sum(Kind::Float)).sum();
    scaler.backward(&loss).unwrap();
}

/// A step inspects and holds the gradients, checks them, steps, and clears the cache of casts. It takes as many calls
/// for many parameters as for one, and with master weights as without.
#[test]
fn a_fused_step_calls_the_shim_four_times() {
    for masters in [MasterWeights::None, MasterWeights::Float, MasterWeights::Remainder] {
        for count in [1, 20] {
            let weights = weights(count, Kind::BFloat16);
            let adam = AdamW::default();
            let mut opt = adam.master_weights(masters).build(&weights, 0.1).unwrap();
            let mut scaler = GradScaler::new(Device::Cpu).unwrap();
            for first in [true, false] {
                opt.zero_grad().unwrap();
                backward(&scaler, &weights);
                let points = fail_points(|| drop(scaler.step(&mut opt).unwrap()));
                let what = format!("{count} parameters with {masters:?}, first step: {first}");
                let calls = points - DEVICES;
                assert!(if first { calls > 4 } else { calls == 4 }, "{what}: {calls}");
                scaler.update().unwrap();
            }
        }
    }
}

/// Without a scaler, a step only steps and clears the cache of casts.
#[test]
fn a_fused_step_without_a_scaler_calls_the_shim_twice() {
    let weights = weights(20, Kind::Float);
    let sgd = Sgd { momentum: 0.9, ..Sgd::default() };
    let mut opt = sgd.build(&weights, 0.1).unwrap();
    backward(&GradScaler::disabled(), &weights);
    opt.step().unwrap();
    assert_eq!(fail_points(|| opt.step().unwrap()), 2);
}

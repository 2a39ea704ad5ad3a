//! Autocast regions: what they set, and that they restore the thread's state.

mod cache;
mod callbacks;
mod guards;
mod losses;
mod operations;
mod overrides;
mod own_arithmetic;
mod plans;
mod porting;
mod programs;
mod regions;
mod threads;

use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::autocast::{AutocastError, AutocastState, autocast_dtype, is_autocast_enabled};
use tch_amp::{Autocast, Error};

const BF16: Kind = Kind::BFloat16;
const F32: Kind = Kind::Float;

/// A thread's autocast state on the CPU: enabled, dtype, cache.
type Seen = (bool, Kind, bool);

fn seen() -> Seen {
    let dtype = autocast_dtype(Device::Cpu).expect("the CPU has a dtype");
    let cache = AutocastState::current().expect("the state can be read").is_cache_enabled();
    (is_autocast_enabled(Device::Cpu), dtype, cache)
}

/// The initial state of a thread.
const OUTSIDE: Seen = (false, Kind::BFloat16, true);

/// The dtype that libtorch gives a product, without a call to the crate.
fn product(device: Device) -> Kind {
    let ones = Tensor::ones([2, 2], (Kind::Float, device));
    ones.mm(&ones).kind()
}

/// A leaf of ones.
fn weight(device: Device) -> Tensor {
    Tensor::ones([2, 2], (Kind::Float, device)).set_requires_grad(true)
}

/// The sum of a product of ones with a weight, of which a region caches the cast.
fn sum_of_product(w: &Tensor) -> f64 {
    w.detach().ones_like().mm(w).sum(Kind::Double).double_value(&[])
}

fn add_one(w: &mut Tensor) {
    let _updated = no_grad(|| w.f_add_scalar_(1.0).unwrap());
}

/// A leaf of random numbers, the same ones on every device.
fn random(device: Device, seed: i64, size: &[i64]) -> Tensor {
    tch::manual_seed(seed);
    Tensor::randn(size, (F32, Device::Cpu)).to_device(device).set_requires_grad(true)
}

/// The gradient of a leaf, or zeros where it has none.
fn gradient(leaf: &Tensor) -> Tensor {
    if leaf.grad().defined() { leaf.grad() } else { leaf.zeros_like() }
}

/// The error of a region that cannot be entered.
fn refusal(region: Autocast) -> AutocastError {
    match region.enter().map(drop) {
        Err(Error::Autocast(error)) => error,
        other => panic!("{other:?}"),
    }
}

//! How what autograd saves is kept: the numbers beside plain loops, what stays as it is, the memory, and what a program
//! may do meanwhile.

mod kept;
mod meets;
mod numbers;

use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::memory::{SavedTensors, peak_during};

use testkit::rng::Rng;

/// All forms, with their names.
fn forms() -> [(&'static str, SavedTensors); 3] {
    [
        ("half", SavedTensors::half()),
        ("fp8_rows", SavedTensors::fp8_rows()),
        ("on_host", SavedTensors::on_host()),
    ]
}

/// Random numbers between -4 and 4, those of a number of rows and columns.
fn random(device: Device, kind: Kind, size: [i64; 2]) -> Tensor {
    let mut rng = Rng::new(u64::try_from(size[0] * 31 + size[1]).unwrap());
    let values: Vec<f32> =
        (0..size[0] * size[1]).map(|_| rng.below(80_001) as f32 / 10_000.0 - 4.0).collect();
    Tensor::from_slice(&values).view(size).to_kind(kind).to_device(device)
}

/// The same numbers with a history, as an activation has: a product of a leaf, which is returned first.
fn activation(device: Device, kind: Kind, size: [i64; 2]) -> (Tensor, Tensor) {
    let leaf = random(device, kind, size).set_requires_grad(true);
    let one = Tensor::ones([size[1]], (kind, device)).set_requires_grad(true);
    let activation = &leaf * one;
    (leaf, activation)
}

/// The gradient of a leaf, which has none afterwards.
fn taken(leaf: &Tensor) -> Tensor {
    let grad = leaf.grad().copy();
    let _zero = no_grad(|| leaf.grad().zero_());
    grad
}

/// What a closure leaves alive on the CPU, in bytes, with its result.
fn alive<T>(f: impl FnOnce() -> T) -> (T, u64) {
    // Nothing writes to it, so that it takes no memory.
    const LARGE: i64 = 1 << 32;
    let run = || {
        let result = f();
        drop(Tensor::empty([LARGE], (Kind::Uint8, Device::Cpu)));
        result
    };
    let (result, peak) = peak_during(run).unwrap();
    (result, peak - LARGE as u64)
}

//! The first step of the tutorial: a training loop in f32.
//!
//! `cargo run --example tutorial_1_f32`

use tch::nn::{self, Module, OptimizerConfig};
use tch::{Device, Kind, Tensor};

/// Points of the plane, and the ring around the origin in which each of them lies.
fn batch(step: i64, device: Device) -> (Tensor, Tensor) {
    let angles = Tensor::arange(96, (Kind::Float, device)) * 2.4 + step as f64;
    let rings = Tensor::arange(96, (Kind::Int64, device)).remainder(3i64);
    let radius: Tensor = &rings + angles.sin() * 0.3 + 0.5;
    (Tensor::stack(&[&radius * angles.cos(), &radius * angles.sin()], 1), rings)
}

fn network(vs: &nn::VarStore) -> nn::Sequential {
    let root = vs.root();
    nn::seq()
        .add(nn::linear(&root / "first", 2, 64, Default::default()))
        .add_fn(|xs| xs.relu())
        .add(nn::linear(&root / "last", 64, 3, Default::default()))
}

/// Trains a network in f32.
pub fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Device::cuda_if_available();
    let vs = nn::VarStore::new(device);
    let net = network(&vs);
    let mut opt = nn::Adam::default().build(&vs, 1e-2)?;
    for step in 0..100 {
        let (xs, ys) = batch(step, device);
        let loss = net.forward(&xs).cross_entropy_for_logits(&ys);
        opt.backward_step(&loss);
    }
    let (xs, ys) = batch(1000, device);
    let accuracy = net.forward(&xs).accuracy_for_logits(&ys).double_value(&[]);
    println!("accuracy {accuracy:.2}");
    assert!(accuracy > 0.8);
    Ok(())
}

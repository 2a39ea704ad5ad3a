//! The second step of the tutorial: mixed precision.
//!
//! `cargo run --example tutorial_2_amp`

use tch::nn::{self, Module, OptimizerConfig};
use tch::{Device, Kind, Tensor};
use tch_amp::Amp;

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

/// Trains in the precision that `MY_PRECISION` names.
pub fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Device::cuda_if_available();
    let chosen = std::env::var("MY_PRECISION").unwrap_or("bf16".to_owned());
    let amp = chosen.parse::<Amp>()?.on(device)?;
    println!("{amp}"); // such as "bf16 on Cpu"
    let vs = nn::VarStore::new(device);
    let net = network(&vs);
    let mut opt = nn::Adam::default().build(&vs, 1e-2)?;
    let mut scaler = amp.scaler()?;
    for step in 0..100 {
        let (xs, ys) = batch(step, device);
        let loss = amp.autocast(|| net.forward(&xs).cross_entropy_for_logits(&ys))?;
        scaler.backward_step(&mut opt, &loss)?;
    }
    let (xs, ys) = batch(1000, device);
    let logits = tch::no_grad(|| amp.autocast(|| net.forward(&xs)))?;
    let accuracy = logits.accuracy_for_logits(&ys).double_value(&[]);
    assert!(accuracy > 0.8);
    Ok(())
}

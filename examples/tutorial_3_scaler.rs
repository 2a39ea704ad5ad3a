//! The third step of the tutorial: a loss scale in fp16, and the steps that it skips.
//!
//! `cargo run --example tutorial_3_scaler`

use tch::nn::{self, Module, OptimizerConfig};
use tch::{Device, Kind, Tensor};
use tch_amp::Amp;
use tch_amp::scaler::GradScalerConfig;

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

/// Trains with a scale that is too large at first.
pub fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Device::cuda_if_available();
    let amp = Amp::Fp16.on(device)?;
    let vs = nn::VarStore::new(device);
    let net = network(&vs);
    let mut opt = nn::Adam::default().build(&vs, 1e-2)?;
    let config = GradScalerConfig {
        init_scale: 2f64.powi(30),
        enabled: amp.needs_scaling(),
        ..Default::default()
    };
    let mut scaler = config.build(device)?;
    let mut skipped = 0;
    for step in 0..40 {
        let (xs, ys) = batch(step, device);
        let loss = amp.autocast(|| net.forward(&xs).cross_entropy_for_logits(&ys))?;
        if scaler.backward_step(&mut opt, &loss)?.is_skipped()? {
            skipped += 1;
        }
    }
    println!("{skipped} steps were skipped, and the scale is now {}", scaler.get_scale()?);
    assert!(skipped > 5 && scaler.get_scale()? < 2f64.powi(25));
    Ok(())
}

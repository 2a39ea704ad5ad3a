//! The fourth step of the tutorial: a fused optimizer, clipping and a schedule.
//!
//! `cargo run --example tutorial_4_schedule`

use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};
use tch_amp::Amp;
use tch_amp::optim::AdamW;
use tch_amp::schedule::{CosineAnnealingLr, LinearLr, SequentialLr};

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

/// Trains with a warm-up and a cosine schedule.
pub fn main() -> tch_amp::Result<()> {
    let device = Device::cuda_if_available();
    let amp = Amp::Bf16.on(device)?;
    let vs = nn::VarStore::new(device);
    let net = network(&vs);
    let mut opt = AdamW { weight_decay: 0.01, ..Default::default() }.build(&vs, 2e-2)?;
    let mut scaler = amp.skipping_scaler()?;
    let warmup = LinearLr { start_factor: 0.1, total_iters: 10, ..Default::default() };
    let cosine = CosineAnnealingLr { t_max: 90, eta_min: 0.0 };
    let mut schedule = SequentialLr::new(warmup).then_at(10, cosine).build(&mut opt)?;
    for step in 0..100 {
        let (xs, ys) = batch(step, device);
        let loss = amp.autocast(|| net.forward(&xs).cross_entropy_for_logits(&ys))?;
        let outcome = scaler.backward_step_clip_norm(&mut opt, &loss, 1.0)?;
        schedule.step(&mut opt, &outcome)?;
    }
    let (xs, ys) = batch(1000, device);
    let logits = tch::no_grad(|| amp.autocast(|| net.forward(&xs)))?;
    assert!(logits.accuracy_for_logits(&ys).double_value(&[]) > 0.8);
    Ok(())
}

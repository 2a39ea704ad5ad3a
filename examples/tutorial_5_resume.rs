//! The fifth step of the tutorial: a run that is resumed has the bits of one that was not interrupted.
//!
//! `cargo run --example tutorial_5_resume`

use std::path::Path;
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};
use tch_amp::Amp;
use tch_amp::checkpoint::{Checkpoint, CheckpointFolder, Rng};
use tch_amp::optim::AdamW;
use tch_amp::schedule::CosineAnnealingLr;

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

fn train(path: &Path, steps: u64) -> tch_amp::Result<f64> {
    let device = Device::cuda_if_available();
    let mut amp = Amp::Auto.on(device)?;
    tch::manual_seed(0);
    let vs = nn::VarStore::new(device);
    let net = network(&vs);
    let mut opt = AdamW::default().build(&vs, 2e-2)?;
    let mut scaler = amp.skipping_scaler()?;
    let mut schedule = CosineAnnealingLr { t_max: 60, eta_min: 0.0 }.build(&mut opt)?;

    let folder = CheckpointFolder::new(path)?.keep_last(2);
    let start = folder.resume_or_start(|checkpoint| {
        checkpoint.restore().add("amp", &mut amp).apply()?;
        scaler = amp.skipping_scaler()?; // that of the restored precision
        let restore = checkpoint.restore().add("model", &vs).add("optimizer", &mut opt);
        restore
            .add("scaler", &mut scaler)
            .add("schedule", &mut schedule)
            .add("rng", Rng(device))
            .apply()?;
        Ok(())
    })?;
    let mut last = f64::NAN;
    for step in start.step..steps {
        let (xs, ys) = batch(step as i64, device);
        let loss = amp.autocast(|| net.forward(&xs).cross_entropy_for_logits(&ys))?;
        let outcome = scaler.backward_step_clip_norm(&mut opt, &loss, 1.0)?;
        schedule.step(&mut opt, &outcome)?;
        last = loss.double_value(&[]);
        if (step + 1) % 10 == 0 {
            let mut checkpoint = Checkpoint::new();
            checkpoint.add("model", &vs)?;
            checkpoint.add("optimizer", &mut opt)?;
            checkpoint.add("amp", &amp)?; // `auto` could choose another one by then
            checkpoint.add("scaler", &mut scaler)?;
            checkpoint.add("schedule", &mut schedule)?;
            checkpoint.add("rng", Rng(device))?;
            folder.save(step + 1, &checkpoint)?;
        }
    }
    Ok(last)
}

/// Trains in two parts, and in one.
pub fn main() -> Result<(), Box<dyn std::error::Error>> {
    let run =
        |name: &str| std::env::temp_dir().join(format!("tch-amp-{name}-{}", std::process::id()));
    let (killed, whole) = (run("killed"), run("whole"));
    train(&killed, 30)?;
    let resumed = train(&killed, 60)?;
    assert_eq!(resumed, train(&whole, 60)?);
    std::fs::remove_dir_all(killed)?;
    std::fs::remove_dir_all(whole)?;
    Ok(())
}

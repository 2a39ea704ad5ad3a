//! A fused AdamW without weight decay for biases and norms, clipping in the step, and a schedule that counts the steps
//! taken. Except for the printed lines, the loop does not synchronize.
//!
//! `cargo run --example fused`

use anyhow::Result;
use tch::nn::{self, Module as _};
use tch::{Device, Kind, Reduction, Tensor};
use tch_amp::optim::AdamW;
use tch_amp::scaler::StepCounter;
use tch_amp::{GradScaler, autocast};

const STEPS: usize = 200;

/// Trains a network on the sine of a sum.
pub fn main() -> Result<()> {
    tch::manual_seed(1);
    let device = Device::cuda_if_available();
    let vs = nn::VarStore::new(device);
    let root = vs.root();
    let net = nn::seq()
        .add(nn::linear(&root / "hidden", 16, 64, Default::default()))
        .add(nn::layer_norm(&root / "norm", vec![64], Default::default()))
        .add_fn(Tensor::relu)
        .add(nn::linear(&root / "out", 64, 1, Default::default()));

    let mut opt = AdamW { weight_decay: 0.1, ..Default::default() }.build(&vs, 0.0)?;
    opt.assign_group(1, &["*.bias", "norm.*"])?;
    opt.set_weight_decay_group(1, 0.0)?;

    let mut scaler = GradScaler::new(device)?;
    let mut taken = StepCounter::default();
    for step in 0..STEPS {
        // Warmup, then decay. Skipped steps do not count.
        let progress = taken.count()? as f64 / STEPS as f64;
        opt.set_lr(1e-2 * (10.0 * progress).min(1.0) * (1.0 - progress))?;

        let xs = Tensor::randn([64, 16], (Kind::Float, device));
        let ys = xs.sum_dim_intlist([1i64].as_slice(), true, Kind::Float).sin();
        opt.zero_grad()?;
        let loss = autocast(device, || net.forward(&xs).mse_loss(&ys, Reduction::Mean))?;
        scaler.backward(&loss)?;
        let outcome = scaler.step_clip_norm(&mut opt, 1.0)?;
        if step % 50 == 0 {
            // Reading the numbers to print them synchronizes.
            let norm = outcome.total_norm().map_or(0.0, |norm| norm.double_value(&[]));
            println!("step {step}: loss {:.3}, gradient norm {norm:.3}", loss.double_value(&[]));
        }
        taken.record(&outcome);
        scaler.update()?;
    }
    println!("{} steps taken, the last learning rate was {:.6}", taken.count()?, opt.lr(0)?);
    Ok(())
}

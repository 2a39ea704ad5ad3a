//! Gradient accumulation: each loss is divided by `n`, and `step` and `update` run after every `n` batches.
//!
//! `cargo run --example accumulation`

use tch::nn::{self, Module, OptimizerConfig};
use tch::{Device, Kind, Reduction, Tensor};
use tch_amp::{GradScaler, autocast};

const ACCUMULATE: usize = 4;

/// Takes one step for every four batches.
pub fn main() -> anyhow::Result<()> {
    let device = Device::cuda_if_available();
    let vs = nn::VarStore::new(device);
    let net = nn::linear(vs.root(), 8, 1, Default::default());
    let mut opt = nn::Adam::default().build(&vs, 5e-2)?;
    let mut scaler = GradScaler::new(device)?;

    let xs = Tensor::randn([64, 8], (Kind::Float, device));
    let ys = xs.sum_dim_intlist(1, true, Kind::Float);
    let loss_of = |xs: &Tensor, ys: &Tensor| net.forward(xs).mse_loss(ys, Reduction::Mean);
    let before = loss_of(&xs, &ys).double_value(&[]);

    let mut steps = 0;
    for _ in 0..50 {
        for (i, (xs, ys)) in xs.chunk(8, 0).iter().zip(ys.chunk(8, 0)).enumerate() {
            let loss = autocast(device, || loss_of(xs, &ys) / ACCUMULATE as f64)?;
            // The scale must not change while gradients accumulate: no `update` in between.
            scaler.backward(&loss)?;
            if (i + 1) % ACCUMULATE == 0 {
                steps += usize::from(scaler.step(&mut opt)?.is_stepped()?);
                scaler.update()?;
                opt.zero_grad();
            }
        }
    }

    let after = loss_of(&xs, &ys).double_value(&[]);
    println!("loss {before:.3} -> {after:.5} after {steps} steps on {} batches", 50 * 8);
    anyhow::ensure!(steps <= 50 * 8 / ACCUMULATE && after < 0.1 * before);
    Ok(())
}

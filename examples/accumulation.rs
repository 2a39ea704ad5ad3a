//! Gradient accumulation: the mean loss of each batch is weighted by its number of samples, and `step` and `update` run
//! after every four batches. The last batch of each epoch is smaller than the others, and so is the last window.
//!
//! `cargo run --example accumulation`

use tch::nn::{self, Module, OptimizerConfig};
use tch::{Device, Kind, Reduction, Tensor};
use tch_amp::accumulation::Accumulation;
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

    // Seven samples in each batch, and one in the last.
    let batches: Vec<_> = xs.split(7, 0).into_iter().zip(ys.split(7, 0)).collect();
    let mut steps = 0;
    for _ in 0..50 {
        for batches in batches.chunks(ACCUMULATE) {
            let samples: Vec<_> = batches.iter().map(|(xs, _)| xs.size()[0] as f64).collect();
            let mut window = Accumulation::of_weights(samples)?;
            for (xs, ys) in batches {
                let loss = autocast(device, || loss_of(xs, ys))?;
                // The scale must not change while gradients accumulate: no `update` in between.
                window.backward(&mut scaler, &loss)?;
            }
            steps += usize::from(scaler.step(&mut opt)?.is_stepped()?);
            scaler.update()?;
            opt.zero_grad();
        }
    }

    let after = loss_of(&xs, &ys).double_value(&[]);
    println!(
        "loss {before:.3} -> {after:.5} after {steps} steps on {} batches",
        50 * batches.len()
    );
    anyhow::ensure!(steps <= 50 * batches.len().div_ceil(ACCUMULATE) && after < 0.1 * before);
    Ok(())
}

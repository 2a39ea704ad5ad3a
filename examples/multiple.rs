//! Two models with a loss and an optimizer each, trained with one scaler and one `update` for both.
//!
//! `cargo run --example multiple`

use tch::nn::{self, Module, OptimizerConfig};
use tch::{Device, Kind, Reduction, Tensor};
use tch_amp::autocast;
use tch_amp::scaler::GradScalerConfig;

/// Trains two models, of which one overflows once.
pub fn main() -> anyhow::Result<()> {
    let device = Device::cuda_if_available();
    let (vs_a, vs_b) = (nn::VarStore::new(device), nn::VarStore::new(device));
    let net_a = nn::linear(vs_a.root(), 8, 1, Default::default());
    let net_b = nn::linear(vs_b.root(), 8, 1, Default::default());
    let mut opt_a = nn::Sgd::default().build(&vs_a, 1e-2)?;
    let mut opt_b = nn::Adam::default().build(&vs_b, 1e-2)?;
    // A smaller scale than the default, so that only the planted overflow skips a step.
    let config = GradScalerConfig { init_scale: 1024.0, ..Default::default() };
    let mut scaler = config.build(device)?;

    let xs = Tensor::randn([32, 8], (Kind::Float, device));
    let ys = xs.sum_dim_intlist(1, true, Kind::Float);
    let broken = xs.full_like(f64::INFINITY);
    let (mut steps_a, mut steps_b) = (0, 0);
    let first_scale = scaler.get_scale()?;
    for i in 0..5 {
        opt_a.zero_grad();
        opt_b.zero_grad();
        // Batch 2 overflows in the second model only.
        let xs_b = if i == 2 { &broken } else { &xs };
        let losses = autocast(device, || {
            let loss = |net: &nn::Linear, xs| net.forward(xs).mse_loss(&ys, Reduction::Mean);
            [loss(&net_a, &xs), loss(&net_b, xs_b)]
        })?;

        // One backward pass for both losses, which may share a part of the graph.
        let scaled = scaler.scale(&losses)?;
        (&scaled[0] + &scaled[1]).f_backward()?;

        scaler.unscale_(&mut opt_a)?; // needed only before clipping
        opt_a.clip_grad_norm(1.0);
        steps_a += i32::from(scaler.step(&mut opt_a)?.is_stepped()?);
        steps_b += i32::from(scaler.step(&mut opt_b)?.is_stepped()?);
        scaler.update()?;
    }

    println!("model a: {steps_a} steps, model b: {steps_b}, scale {}", scaler.get_scale()?);
    anyhow::ensure!(steps_a == 5 && steps_b == 4, "only b's overflowing step is skipped");
    anyhow::ensure!(scaler.get_scale()? == first_scale / 2.0, "the scale backs off once");
    Ok(())
}

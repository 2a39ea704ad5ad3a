//! Gradient clipping, in two ways. Gradients must be unscaled before they are clipped.
//!
//! `cargo run --example clipping`

use tch::nn::{self, Module, OptimizerConfig};
use tch::{Device, Kind, Reduction, Tensor};
use tch_amp::autocast;
use tch_amp::scaler::GradScalerConfig;

const MAX_NORM: f64 = 0.5;

/// Returns the 2-norm of all gradients together.
fn grad_norm(vs: &nn::VarStore) -> f64 {
    let square = |v: &Tensor| v.grad().square().sum(Kind::Double).double_value(&[]);
    vs.trainable_variables().iter().map(square).sum::<f64>().sqrt()
}

/// Clips the gradients in both ways and checks the norms.
pub fn main() -> anyhow::Result<()> {
    let device = Device::cuda_if_available();
    let vs = nn::VarStore::new(device);
    let net = nn::linear(vs.root(), 8, 1, Default::default());
    let mut opt = nn::Sgd::default().build(&vs, 1e-2)?;
    // A smaller scale than the default, so that none of the few steps here is skipped.
    let config = GradScalerConfig { init_scale: 1024.0, ..Default::default() };
    let mut scaler = config.build(device)?;
    let xs = Tensor::randn([32, 8], (Kind::Float, device));
    let ys = xs.sum_dim_intlist(1, true, Kind::Float);
    let loss = || autocast(device, || net.forward(&xs).mse_loss(&ys, Reduction::Mean));

    // 1. As in PyTorch: between `unscale_` and `step` the gradients are unscaled.
    opt.zero_grad();
    scaler.backward(&loss()?)?;
    scaler.unscale_(&mut opt)?;
    opt.clip_grad_norm(MAX_NORM);
    println!("with unscale_: norm {:.3} after clipping", grad_norm(&vs));
    anyhow::ensure!(grad_norm(&vs) < 1.01 * MAX_NORM);
    let first = scaler.step(&mut opt)?;
    scaler.update()?;

    // 2. As a transaction: the methods for clipping belong to the unscaled gradients, so that clipping scaled
    //    gradients, unscaling twice and stepping twice do not compile. Dropping `grads` leaves the step out.
    opt.zero_grad();
    scaler.backward(&loss()?)?;
    let mut grads = scaler.unscale(&mut opt)?;
    let norm = grads.clip_grad_norm(MAX_NORM)?;
    let second = grads.step()?;
    scaler.update()?;
    let (before, after) = (norm.double_value(&[]), grad_norm(&vs));
    println!("with a transaction: norm {before:.3} before and {after:.3} after clipping");
    anyhow::ensure!(norm.double_value(&[]) > MAX_NORM && grad_norm(&vs) < 1.01 * MAX_NORM);

    anyhow::ensure!(first.is_stepped()? && second.is_stepped()?, "a step was skipped");
    Ok(())
}

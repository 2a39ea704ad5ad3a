//! A gradient penalty: the loss contains the norm of its own gradients, which must be unscaled for that.
//!
//! `cargo run --example penalty`

use tch::nn::{self, Module, OptimizerConfig};
use tch::{Device, Kind, Reduction, Tensor};
use tch_amp::function::{GradConfig, grad};
use tch_amp::{GradScaler, autocast};

/// Trains with the norm of the gradients in the loss.
pub fn main() -> anyhow::Result<()> {
    let device = Device::cuda_if_available();
    let vs = nn::VarStore::new(device);
    let net = nn::seq()
        .add(nn::linear(vs.root() / "hidden", 8, 16, Default::default()))
        .add_fn(Tensor::tanh)
        .add(nn::linear(vs.root() / "out", 16, 1, Default::default()));
    let params = vs.trainable_variables();
    let mut opt = nn::Adam::default().build(&vs, 1e-2)?;
    let mut scaler = GradScaler::new(device)?;
    let xs = Tensor::randn([64, 8], (Kind::Float, device));
    let ys = xs.sum_dim_intlist(1, true, Kind::Float);

    let mut totals = Vec::new();
    for _ in 0..100 {
        opt.zero_grad();
        let loss = autocast(device, || net.forward(&xs).mse_loss(&ys, Reduction::Mean))?;

        // The gradients of the scaled loss, as part of the graph. `unscale_` only unscales the gradients of an
        // optimizer's parameters, so divide these by the scale here, outside of the region.
        let scaled = scaler.scale(&loss)?;
        let config = GradConfig { create_graph: true, ..Default::default() };
        let grads = grad(&[scaled], &params, &config)?;
        let scale = scaler.get_scale()?;
        let grads: Vec<Tensor> = grads.iter().flatten().map(|grad| grad / scale).collect();

        let total = autocast(device, || {
            let squares: Vec<Tensor> = grads.iter().map(|g| g.square().sum(Kind::Float)).collect();
            &loss + 0.1 * Tensor::stack(&squares, 0).sum(Kind::Float).sqrt()
        })?;

        scaler.backward(&total)?;
        if scaler.step(&mut opt)?.is_stepped()? {
            totals.push(total.double_value(&[]));
        }
        scaler.update()?;
    }

    let (first, last) = (totals[0], totals[totals.len() - 1]);
    println!("loss with penalty {first:.3} -> {last:.3} in {} steps", totals.len());
    anyhow::ensure!(last < 0.5 * first, "the loss did not fall: {first} -> {last}");
    Ok(())
}

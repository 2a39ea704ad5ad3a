//! A tch training loop with mixed precision. The lines that differ from plain tch are marked `amp`.
//!
//! `cargo run --example train`, on a GPU if there is one. `MY_PRECISION=bf16` names the precision, which is `auto`
//! otherwise: what is fast on the device.

use tch::nn::{self, Module, OptimizerConfig};
use tch::{Device, Kind, Reduction, Tensor};
use tch_amp::Amp; // amp

/// Trains a small network in mixed precision.
pub fn main() -> anyhow::Result<()> {
    let device = Device::cuda_if_available();
    let vs = nn::VarStore::new(device);
    let net = nn::seq()
        .add(nn::linear(vs.root() / "hidden", 8, 32, Default::default()))
        .add_fn(Tensor::relu)
        .add(nn::linear(vs.root() / "out", 32, 1, Default::default()));
    let mut opt = nn::Adam::default().build(&vs, 1e-2)?;
    let chosen = std::env::var("MY_PRECISION").unwrap_or("auto".to_owned()); // amp
    let amp = chosen.parse::<Amp>()?.on(device)?; // amp
    println!("{amp}");
    let mut scaler = amp.scaler()?; // amp

    let xs = Tensor::randn([64, 8], (Kind::Float, device));
    let ys = xs.sum_dim_intlist(1, true, Kind::Float);
    let mut losses = Vec::new();
    for _ in 0..200 {
        let loss = amp.autocast(|| net.forward(&xs).mse_loss(&ys, Reduction::Mean))?; // amp
        let outcome = scaler.backward_step(&mut opt, &loss)?; // amp: was `opt.backward_step(&loss)`
        if outcome.is_stepped()? {
            losses.push(loss.double_value(&[])); // a learning-rate schedule advances here, too
        }
    }

    let (first, last) = (losses[0], losses[losses.len() - 1]);
    println!(
        "loss {first:.3} -> {last:.5} in {} steps, scale {}",
        losses.len(),
        scaler.get_scale()?
    );
    anyhow::ensure!(last < 0.1 * first, "the loss did not fall: {first} -> {last}");
    Ok(())
}

//! An optimizer of your own with the scaler: signed gradient descent, which implements `AmpOptimizer`.
//!
//! `cargo run --example own_optimizer`

use tch::nn::{self, Module};
use tch::{Device, Kind, Reduction, Tensor};
use tch_amp::optim::{AmpOptimizer, Parameters, Step};
use tch_amp::{GradScaler, autocast};

struct SignSgd {
    params: Vec<Tensor>,
    lr: f64,
}

impl AmpOptimizer for SignSgd {
    fn parameters(&self) -> Parameters<'_> {
        self.params.as_slice().into()
    }

    fn update(&mut self, _step: &Step<'_>) -> tch_amp::Result<()> {
        tch::no_grad(|| self.params.iter_mut().for_each(|p| *p -= p.grad().sign() * self.lr));
        Ok(())
    }
}

/// Trains with an optimizer that tch does not have.
pub fn main() -> anyhow::Result<()> {
    let device = Device::cuda_if_available();
    let vs = nn::VarStore::new(device);
    let net = nn::linear(vs.root(), 8, 1, Default::default());
    let mut opt = SignSgd { params: vs.trainable_variables(), lr: 1e-2 };
    let mut scaler = GradScaler::new(device)?;
    let xs = Tensor::randn([64, 8], (Kind::Float, device));
    let ys = xs.sum_dim_intlist(1, true, Kind::Float);

    let mut losses = Vec::new();
    for _ in 0..150 {
        opt.params.iter_mut().for_each(Tensor::zero_grad);
        let loss = autocast(device, || net.forward(&xs).mse_loss(&ys, Reduction::Mean))?;
        scaler.backward(&loss)?;
        if scaler.step(&mut opt)?.is_stepped()? {
            losses.push(loss.double_value(&[]));
        }
        scaler.update()?;
    }

    let (first, last) = (losses[0], losses[losses.len() - 1]);
    println!("loss {first:.3} -> {last:.5} in {} steps", losses.len());
    anyhow::ensure!(last < 0.1 * first, "the loss did not fall: {first} -> {last}");
    Ok(())
}

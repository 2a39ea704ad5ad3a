//! Saves the scaler as JSON, under PyTorch's keys, and goes on from there with the same next steps.
//!
//! `cargo run --example resume`

use tch::nn::{self, Module, OptimizerConfig};
use tch::{Device, Kind, Reduction, Tensor};
use tch_amp::{GradScaler, GradScalerConfig, GradScalerState, autocast};

struct Run {
    vs: nn::VarStore,
    net: nn::Linear,
    opt: nn::Optimizer,
    scaler: GradScaler,
}

impl Run {
    fn new(device: Device) -> anyhow::Result<Self> {
        let vs = nn::VarStore::new(device);
        let net = nn::linear(vs.root(), 8, 1, Default::default());
        // Without momentum the optimizer has no state of its own to save.
        let opt = nn::Sgd::default().build(&vs, 1e-2)?;
        // A short interval, so that the scale moves while we watch.
        let config =
            GradScalerConfig { init_scale: 256.0, growth_interval: 3, ..Default::default() };
        let scaler = config.build(device)?;
        Ok(Self { vs, net, opt, scaler })
    }

    /// Trains for four steps and returns the losses and the scale after each.
    fn train(&mut self, xs: &Tensor, ys: &Tensor) -> anyhow::Result<Vec<(f64, f64)>> {
        let mut history = Vec::new();
        for _ in 0..4 {
            self.opt.zero_grad();
            let loss = || self.net.forward(xs).mse_loss(ys, Reduction::Mean);
            let loss = autocast(self.vs.device(), loss)?;
            self.scaler.backward(&loss)?;
            anyhow::ensure!(self.scaler.step(&mut self.opt)?.is_stepped()?);
            self.scaler.update()?;
            history.push((loss.double_value(&[]), self.scaler.get_scale()?));
        }
        Ok(history)
    }
}

/// Trains, saves, and checks that the saved run goes on like the first.
pub fn main() -> anyhow::Result<()> {
    let device = Device::cuda_if_available();
    let xs = Tensor::randn([32, 8], (Kind::Float, device));
    let ys = xs.sum_dim_intlist(1, true, Kind::Float);
    let mut first = Run::new(device)?;
    first.train(&xs, &ys)?;

    // After `update`: between `unscale_` or `step` and it, a part of the state is in the gradients.
    let json = serde_json::to_string(&first.scaler.state_dict()?)?;
    println!("{json}");

    let mut resumed = Run::new(device)?;
    resumed.vs.copy(&first.vs)?;
    resumed.scaler.load_state_dict(&serde_json::from_str::<GradScalerState>(&json)?)?;

    let (expected, got) = (first.train(&xs, &ys)?, resumed.train(&xs, &ys)?);
    println!("losses and scales after the save: {got:?}");
    anyhow::ensure!(got == expected, "a resumed run takes the same steps: {expected:?}");
    Ok(())
}

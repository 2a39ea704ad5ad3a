//! The sixth step of the tutorial: which part suffers in half precision, and why a step was skipped.
//!
//! `cargo run --features insight --example tutorial_6_insight`

use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};
use tch_amp::insight::{self, Cause, Tracer, named};
use tch_amp::optim::AdamW;
use tch_amp::{Amp, Autocast, GradScaler, Result};

/// Prints an audit, and explains a skipped step.
pub fn main() -> Result<()> {
    let device = Device::cuda_if_available();
    tch::manual_seed(1);
    let vs = nn::VarStore::new(device);
    let first = nn::linear(vs.root() / "first", 2, 64, Default::default());
    let last = nn::linear(vs.root() / "last", 64, 1, Default::default());
    let xs = Tensor::arange(64, (Kind::Float, device)).view([32, 2]) / 8.0;
    let loss = |region: Autocast, size: f64| {
        region.run(|| {
            let hidden = first.forward(&(&xs * size));
            let hidden = named("square", || &hidden * &hidden);
            let p = last.forward(&hidden).sigmoid();
            named("loss", || -(1i64 - p + 1e-6).log().mean(Kind::Float))
        })
    };

    // Which part of the model suffers in half precision?
    let bf16 = Autocast::new(device).dtype(Kind::BFloat16); // PyTorch's lists alone
    let audit = insight::audit(&vs, &bf16, &GradScaler::disabled(), |region| loss(region, 1.0))?;
    println!("{audit}");

    // Why was this step skipped?
    let fp16 = Amp::Fp16.on(device)?;
    let mut opt = AdamW::default().build(&vs, 1e-2)?;
    let mut scaler = fp16.scaler()?;
    let mut tracer = Tracer::new(&vs)?;
    tracer.begin(&scaler)?;
    let outcome = scaler.backward_step(&mut opt, &loss(fp16.region(), 1000.0)?)?;
    let why = tracer.explain_if_skipped(&scaler, &outcome, || loss(fp16.region(), 1000.0))?;
    if let Some(why) = &why {
        println!("{why}");
    }
    assert!(why.is_some_and(|why| why.cause == Cause::Values));
    Ok(())
}

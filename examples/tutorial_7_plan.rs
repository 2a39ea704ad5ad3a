//! The seventh step of the tutorial: a measured plan, which is kept in a file.
//!
//! `cargo run --features insight --example tutorial_7_plan`

use std::error::Error;
use std::path::Path;

use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};
use tch_amp::autocast::Plan;
use tch_amp::insight::Tuner;
use tch_amp::optim::{AdamW, Optimizer};
use tch_amp::{Amp, GradScaler, MixedPrecision};

fn batch(step: i64, device: Device) -> (Tensor, Tensor) {
    let angles = Tensor::arange(96, (Kind::Float, device)) * 2.4 + step as f64;
    let rings = Tensor::arange(96, (Kind::Int64, device)).remainder(3i64);
    let radius: Tensor = &rings + angles.sin() * 0.3 + 0.5;
    (Tensor::stack(&[&radius * angles.cos(), &radius * angles.sin()], 1), rings)
}

fn network(vs: &nn::VarStore) -> nn::Sequential {
    let root = vs.root();
    nn::seq()
        .add(nn::linear(&root / "first", 2, 64, Default::default()))
        .add_fn(|xs| xs.relu())
        .add(nn::linear(&root / "last", 64, 3, Default::default()))
}

/// The model with everything that trains it.
struct Trainer {
    amp: MixedPrecision,
    vs: nn::VarStore,
    net: nn::Sequential,
    opt: Optimizer,
    scaler: GradScaler,
}

/// The precision with the plan of the file, or with one that is measured now and written there.
fn planned(
    amp: MixedPrecision,
    file: &Path,
    vs: &nn::VarStore,
    net: &nn::Sequential,
) -> Result<MixedPrecision, Box<dyn Error>> {
    let text = std::fs::read_to_string(file).ok();
    let plan = text.and_then(|text| serde_json::from_str::<Plan>(&text).ok());
    if let Some(planned) = plan.and_then(|plan| amp.clone().plan(&plan).ok()) {
        return Ok(planned);
    }
    let (xs, ys) = batch(0, amp.device());
    let tuning = Tuner::default().tune(vs, &amp.region(), &amp.scaler()?, |region| {
        region.run(|| net.forward(&xs).cross_entropy_for_logits(&ys))
    })?;
    println!("{tuning}");
    std::fs::write(file, serde_json::to_string(&tuning.plan)?)?;
    Ok(amp.plan(&tuning.plan)?)
}

impl Trainer {
    fn new(amp: MixedPrecision, file: &Path) -> Result<Self, Box<dyn Error>> {
        let vs = nn::VarStore::new(amp.device());
        let net = network(&vs);
        let amp = planned(amp, file, &vs, &net)?;
        let opt = AdamW::default().build(&vs, 1e-2)?;
        let scaler = amp.skipping_scaler()?;
        Ok(Self { amp, vs, net, opt, scaler })
    }

    fn step(&mut self, step: i64) -> tch_amp::Result<()> {
        let (xs, ys) = batch(step, self.vs.device());
        let loss = self.amp.autocast(|| self.net.forward(&xs).cross_entropy_for_logits(&ys))?;
        self.scaler.backward_step(&mut self.opt, &loss)?;
        Ok(())
    }
}

/// Trains with a plan, and reads it again.
pub fn main() -> Result<(), Box<dyn Error>> {
    let amp = Amp::Bf16.on(Device::cuda_if_available())?;
    let name = format!("tch-amp-plan-{}.json", std::process::id());
    let file = std::env::temp_dir().join(name);
    let mut trainer = Trainer::new(amp.clone(), &file)?; // measures
    println!("{}", trainer.amp);
    for step in 0..100 {
        trainer.step(step)?;
    }
    let (xs, ys) = batch(1000, trainer.vs.device());
    let logits = tch::no_grad(|| trainer.amp.autocast(|| trainer.net.forward(&xs)))?;
    assert!(logits.accuracy_for_logits(&ys).double_value(&[]) > 0.8);

    let second = Trainer::new(amp, &file)?; // reads the file
    assert_eq!(second.amp.to_string(), trainer.amp.to_string());
    std::fs::remove_file(file)?;
    Ok(())
}

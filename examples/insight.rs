//! Trains a small transformer in fp16, in which one batch is bad and the attention is not scaled, and writes a page
//! that shows what happened: the loss, the scale, the skipped steps with the operators to blame, the exponents of the
//! gradients, an audit, a precision budget and what the operators cost.
//!
//! `cargo run --example insight -- insight.html`

use std::path::{Path, PathBuf};

use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::insight::{Budget, Page, Profiler, ScaleHealth, ScaleHistory, Tracer, audit, named};
use tch_amp::optim::AdamW;
use tch_amp::{Autocast, GradScaler, Result};

const STEPS: u64 = 200;
const WIDTH: i64 = 32;
const LENGTH: i64 = 8;

/// One block of a transformer, and a layer that predicts the input.
struct Model {
    norm: nn::LayerNorm,
    qkv: nn::Linear,
    out: nn::Linear,
}

impl Model {
    fn new(root: &nn::Path<'_>) -> Self {
        Self {
            norm: nn::layer_norm(root / "norm", vec![WIDTH], Default::default()),
            qkv: nn::linear(root / "qkv", WIDTH, 3 * WIDTH, Default::default()),
            out: nn::linear(root / "out", WIDTH, WIDTH, Default::default()),
        }
    }

    /// The mean squared error of what it predicts for inputs of this size.
    fn loss(&self, x: &Tensor, size: f64) -> Tensor {
        let qkv = (self.norm.forward(x) * size).apply(&self.qkv).chunk(3, -1);
        let attention = named("attention", || {
            // Without a division by the root of the width, large inputs overflow here.
            let scores = qkv[0].matmul(&qkv[1].transpose(1, 2));
            scores.softmax(-1, None).matmul(&qkv[2])
        });
        let predicted = x + attention.apply(&self.out);
        named("loss", || (predicted.to_kind(Kind::Float) - x.tanh()).square().mean(None))
    }
}

/// Trains, and gathers everything that there is to know.
///
/// # Errors
///
/// Those of libtorch and of writing the page.
pub fn run(path: &Path) -> Result<Page> {
    tch::manual_seed(0);
    let device = Device::cuda_if_available();
    let vs = VarStore::new(device);
    let model = Model::new(&vs.root());
    let mut optimizer = AdamW::default().build(&vs, 1e-3)?;
    let mut scaler = GradScaler::new(device)?;
    let region = Autocast::new(device).dtype(Kind::Half);

    let mut page = Page::new("A transformer in fp16");
    let (mut tracer, mut health) = (Tracer::new(&vs)?, ScaleHealth::new(&vs));
    let mut history = ScaleHistory::new(10_000)?;
    for step in 1..=STEPS {
        let x = Tensor::randn([4, LENGTH, WIDTH], (Kind::Float, device));
        let size = if step == STEPS / 2 { 500.0 } else { 1.0 };
        let compute = || region.run(|| model.loss(&x, size));
        tracer.begin(&scaler)?;
        optimizer.zero_grad()?;
        let loss = compute()?;
        scaler.backward(&loss)?;
        health.observe(&scaler)?;
        let outcome = scaler.step_clip_norm(&mut optimizer, 1.0)?;
        history.set_loss(&loss)?;
        history.record(&scaler, &outcome, 1e-3)?;
        scaler.update()?;
        page.explanations.extend(tracer.explain_if_skipped(&scaler, &outcome, compute)?);
        if step.is_multiple_of(10) {
            page.health.push((step, health.report()?));
            health.clear();
        }
    }
    page.history = Some(history.report()?);

    let x = Tensor::randn([4, LENGTH, WIDTH], (Kind::Float, device));
    let audited = |region: Autocast| region.run(|| model.loss(&x, 1.0));
    page.audits.push(audit(&vs, &region, &scaler, audited)?);
    page.budgets.push(Budget::new(&vs, region).measure(
        || AdamW::default().build(&vs, 1e-3),
        |run, optimizer| {
            optimizer.zero_grad()?;
            let loss = run.region(|| model.loss(&x, 1.0))?;
            run.scaler().backward(&loss)?;
            let _outcome = run.scaler().step_clip_norm(optimizer, 1.0)?;
            run.scaler().update()?;
            Ok(loss)
        },
    )?);
    let iteration = || Ok(region.run(|| model.loss(&x, 1.0))?.f_backward()?);
    page.operators.push(Profiler::new(&vs).runs(5).run(iteration)?);
    page.write(path)?;
    Ok(page)
}

fn main() -> Result<()> {
    let path = std::env::args_os().nth(1).map_or_else(|| "insight.html".into(), PathBuf::from);
    println!("{}\n\nThe page: {}", run(&path)?, path.display());
    Ok(())
}

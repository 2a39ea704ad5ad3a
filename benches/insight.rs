//! What the module `insight` costs. Each part compares an iteration of the GPT of the training benchmark with and
//! without a call, in bf16 on the CPU, and prints a ratio of their times: 1 if the call costs nothing.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark fails by panicking")]

mod common;
#[allow(dead_code, reason = "only one of the models is used")]
#[path = "training/models.rs"]
mod models;

use common::{is_quick, median, nanoseconds};
use models::{Batch, Model, model};
use tch::nn::VarStore;
use tch::{Device, Kind};
use tch_amp::insight::ScaleHealth;
use tch_amp::optim::{AdamW, Optimizer};
use tch_amp::{Autocast, GradScaler, memory};

/// How many iterations there are between two observations.
const INTERVAL: f64 = 100.0;

/// The name of a ratio, and what measures it.
type Part = (&'static str, fn() -> f64);

const PARTS: &[Part] = &[("insight_histogram", histogram)];

fn main() {
    tch::set_num_threads(1);
    let _kept = memory::keep_freed_memory();
    for (name, part) in PARTS {
        println!("ratio {name} {:.4}", part());
    }
}

struct Training {
    vs: VarStore,
    model: Model,
    batch: Batch,
    optimizer: Optimizer,
    scaler: GradScaler,
}

impl Training {
    fn new() -> Self {
        tch::manual_seed(1);
        let vs = VarStore::new(Device::Cpu);
        let model = model("gpt", &vs.root());
        let optimizer = AdamW::default().build(&vs, 1e-4).unwrap();
        let batch = model.batch.batch();
        Self { vs, model, batch, optimizer, scaler: GradScaler::new(Device::Cpu).unwrap() }
    }

    /// An iteration in which `before_step` is called between the backward pass and the step.
    fn iterate(&mut self, mut before_step: impl FnMut(&GradScaler)) {
        self.optimizer.zero_grad().unwrap();
        let region = Autocast::new(Device::Cpu).dtype(Kind::BFloat16);
        let loss = region.run(|| (self.model.loss)(&self.batch)).unwrap();
        self.scaler.backward(&loss).unwrap();
        before_step(&self.scaler);
        drop(self.scaler.step(&mut self.optimizer).unwrap());
        self.scaler.update().unwrap();
    }
}

/// An observation of the exponents of all gradients in every hundredth iteration.
fn histogram() -> f64 {
    let mut training = Training::new();
    let mut health = ScaleHealth::new(&training.vs);
    let (mut iterations, mut observations) = (Vec::new(), Vec::new());
    let rounds = if is_quick() { 3 } else { 30 };
    // The first round is a warm-up.
    for round in 0..=rounds {
        let mut observation = 0.0;
        let all = nanoseconds(|| {
            training.iterate(|scaler| {
                observation = nanoseconds(|| health.observe(scaler).unwrap());
            });
        });
        if round > 0 {
            iterations.push(all - observation);
            observations.push(observation);
        }
    }
    let [iteration, observation] = [iterations, observations].map(median);
    println!(
        "an iteration takes {:.1} ms, and an observation of its gradients {:.2} ms\n{}",
        iteration / 1e6,
        observation / 1e6,
        health.report().unwrap()
    );
    1.0 + observation / (INTERVAL * iteration)
}

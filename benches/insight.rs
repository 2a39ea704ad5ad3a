//! What the module `insight` costs. Each part compares an iteration of the GPT of the training benchmark with and
//! without a call, in bf16 on the CPU, and prints a ratio of their times: 1 if the call costs nothing. The last one is
//! about Python's `detect_anomaly` instead.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark fails by panicking")]

mod common;
#[allow(dead_code, reason = "only one of the models is used")]
#[path = "training/models.rs"]
mod models;

use common::{Python, is_quick, median, nanoseconds};
use models::{Batch, Model, model};
use tch::nn::VarStore;
use tch::{Device, Kind};
use tch_amp::insight::{ScaleHealth, Tracer, audit};
use tch_amp::optim::{AdamW, Optimizer};
use tch_amp::{Autocast, GradScaler, memory};

/// How many iterations there are between two observations.
const INTERVAL: f64 = 100.0;

/// The name of a ratio, and what measures it.
type Part = (&'static str, fn() -> f64);

/// The ratio of Python's `detect_anomaly`, which comes last, because it is missing without Python.
const ANOMALY: &str = "insight_anomaly";

const PARTS: &[Part] = &[
    // This one is about programs that never used insight, so it comes before all others.
    ("insight_off", off),
    ("insight_replay", replay),
    ("insight_audit", audited),
    ("insight_histogram", histogram),
];

fn main() {
    tch::set_num_threads(1);
    let _kept = memory::keep_freed_memory();
    for (name, part) in PARTS {
        println!("ratio {name} {:.4}", part());
    }
    match Python::start("training.py") {
        Some(mut python) => println!("ratio {ANOMALY} {:.4}", anomaly(&mut python)),
        None => println!("{ANOMALY} is left out, because it needs Python"),
    }
}

/// An iteration in Python within `torch.autograd.detect_anomaly`, over one outside. It is on in every iteration, where
/// a tracer costs only the steps that it explains.
fn anomaly(python: &mut Python) -> f64 {
    let rounds = rounds().div_ceil(3);
    // The first two are a warm-up.
    let times = python.time(&format!("anomaly gpt {}", rounds + 1));
    let every_second = |first| times.iter().skip(first).step_by(2).copied().collect();
    median(every_second(3)) / median(every_second(2))
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
        let batch = model.batch.batch(Device::Cpu);
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

fn rounds() -> usize {
    if is_quick() { 3 } else { 30 }
}

impl Training {
    /// The median time of an iteration, after one that is not counted.
    fn time(&mut self) -> f64 {
        self.iterate(|_| {});
        median((0..rounds()).map(|_| nanoseconds(|| self.iterate(|_| {}))).collect())
    }

    /// Explains an iteration whose loss overflows, and returns the time that it takes.
    fn explain(&mut self) -> f64 {
        let mut tracer = Tracer::new(&self.vs).unwrap();
        tracer.begin(&self.scaler).unwrap();
        let region = Autocast::new(Device::Cpu).dtype(Kind::BFloat16);
        let loss = || region.run(|| (self.model.loss)(&self.batch) * 3e38 * 3e38);
        let mut explanation = None;
        let time = nanoseconds(|| explanation = tracer.explain(&self.scaler, loss).unwrap());
        let culprit = explanation.unwrap().culprit.unwrap();
        assert_eq!(culprit.operator, "aten::mul", "{culprit}");
        time
    }
}

/// An iteration after an explanation, over one of a program that has never asked for any.
fn off() -> f64 {
    let mut training = Training::new();
    let never = training.time();
    training.explain();
    training.time() / never
}

/// An explanation over an iteration.
fn replay() -> f64 {
    let mut training = Training::new();
    let iteration = training.time();
    let times = (0..rounds().div_ceil(3)).map(|_| training.explain()).collect();
    median(times) / iteration
}

/// An audit over an iteration.
fn audited() -> f64 {
    let mut training = Training::new();
    let iteration = training.time();
    let region = Autocast::new(Device::Cpu).dtype(Kind::BFloat16);
    let mut times = Vec::new();
    for _ in 0..rounds().div_ceil(10) {
        let loss = |region: Autocast| region.run(|| (training.model.loss)(&training.batch));
        let audited = || audit(&training.vs, &region, &training.scaler, loss).unwrap();
        times.push(nanoseconds(|| assert!(audited().suspicious().is_empty())));
    }
    median(times) / iteration
}

/// An observation of the exponents of all gradients in every hundredth iteration.
fn histogram() -> f64 {
    let mut training = Training::new();
    let mut health = ScaleHealth::new(&training.vs);
    let (mut iterations, mut observations) = (Vec::new(), Vec::new());
    let rounds = rounds();
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

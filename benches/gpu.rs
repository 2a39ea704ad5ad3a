//! Whole training iterations on a GPU in f32, TF32, bf16 and fp16, compared with Python's `torch.amp` with the same
//! libtorch, for models whose iterations are bound by the host, and for models that fill the GPU.
//!
//! An iteration is that of the benchmark `training`. Both sides start from the same weights and train on the same
//! batch, and their losses are compared first. Several iterations are enqueued and synchronized with at the end: `ms` is
//! the time of one of them, and `host` the time for which the host was busy with it. `clip` is fp16 with gradients that
//! are clipped to a norm: by `step_clip_norm` here, and by `unscale_`, `clip_grad_norm_` and `step` in Python. `bare` is
//! fp16 without loss scaling, for what that costs. `graph` is fp16 whose iterations are replayed by
//! [`Captured`]. `plan` is bf16 with the plan that a
//! [`Tuner`](tch_amp::insight::Tuner) measures.
//!
//! `step` is no model: the step of AdamW alone, with f32, bf16 and 8-bit moments, beside the speed of a copy.
//!
//! f32 is `MatmulPrecision::Highest`, TF32 is `High`. Convolutions and RNNs use TF32 in both, as cuDNN does by default.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark fails by panicking")]

mod common;
#[path = "common/folder.rs"]
mod folder;
#[path = "training/iterations.rs"]
mod iterations;
#[path = "training/models.rs"]
mod models;
#[path = "common/states.rs"]
mod states;

use std::time::Instant;

use common::{Python, Row, is_quick, median, print_ratio};
use folder::Folder;
use iterations::Training;
use models::NAMES;
use states::Place;
use tch::{Cuda, Device, Kind, Tensor};
use tch_amp::Autocast;
use tch_amp::checkpoint::Checkpoint;
use tch_amp::graph::Captured;
use tch_amp::memory::DeviceMemory;
use tch_amp::precision::MatmulPrecision;

/// The names of the models that fill the GPU.
const LARGE: [&str; 5] = ["mlp_4x4096", "gpt_124m", "conv_large", "bert_base", "lstm_large"];

/// The name of the step alone.
const STEP: &str = "step";

const GPU: Device = Device::Cuda(0);

/// The number of iterations whose losses are compared.
const CHECKED: usize = 6;

/// The norm to which gradients are clipped where they are.
const MAX_NORM: f64 = 1.0;

/// A way to train.
#[derive(Clone, Copy, PartialEq)]
struct Way {
    name: &'static str,
    dtype: Option<Kind>,
    /// How far the losses may be from those of Python, which sums in another order.
    tolerance: f64,
    is_in_python: bool,
}

const fn way(name: &'static str, dtype: Option<Kind>, tolerance: f64, is_in_python: bool) -> Way {
    Way { name, dtype, tolerance, is_in_python }
}

const WAYS: [Way; 8] = [
    way("fp32", None, 1e-4, true),
    way("tf32", None, 2e-3, true),
    way("bf16", Some(Kind::BFloat16), 1e-2, true),
    way("fp16", Some(Kind::Half), 2e-3, true),
    way("clip", Some(Kind::Half), 2e-3, true),
    way("bare", Some(Kind::Half), 2e-3, false),
    way("graph", Some(Kind::Half), 2e-3, false),
    way("plan", Some(Kind::BFloat16), 1e-2, false),
];

impl Way {
    fn training(self, name: &str, weights: &Checkpoint) -> Training {
        let dtype = self.dtype.unwrap_or(Kind::BFloat16);
        let region = Autocast::new(GPU).dtype(dtype).enabled(self.dtype.is_some());
        let scales = self.dtype == Some(Kind::Half) && self.name != "bare";
        let mut training = Training::new(name, weights, GPU, region, scales);
        training.max_norm = (self.name == "clip").then_some(MAX_NORM);
        if self.name == "plan" { training.tuned(name, weights) } else { training }
    }

    fn set_precision(self) {
        let high = self.name == "tf32";
        let precision = if high { MatmulPrecision::High } else { MatmulPrecision::Highest };
        precision.set().unwrap();
    }
}

/// A training, and the graph that replays its iterations if there is one.
struct Trained {
    training: Training,
    graph: Option<Captured<Tensor>>,
}

impl Trained {
    fn new(way: Way, name: &str, weights: &Checkpoint) -> Self {
        let graph = (way.name == "graph").then(|| Captured::new(GPU).unwrap());
        Self { training: way.training(name, weights), graph }
    }

    /// Takes an iteration, and returns its loss.
    fn iterate(&mut self) -> Tensor {
        let Self { training, graph } = self;
        match graph {
            Some(graph) => {
                let replay = graph.replay(|| Ok(training.iterate().0.detach())).unwrap();
                replay.output().shallow_clone()
            }
            None => training.iterate().0,
        }
    }

    /// The losses of the first iterations.
    fn losses(&mut self, count: usize) -> Vec<f64> {
        (0..count).map(|_| self.iterate().double_value(&[])).collect()
    }
}

/// What both sides measure in one round: nanoseconds of an iteration, nanoseconds of the host, and bytes.
type Round = [f64; 3];

fn run(training: &mut Trained, iterations: usize) -> Round {
    DeviceMemory::reset_peak(GPU).unwrap();
    Cuda::synchronize(0);
    let start = Instant::now();
    for _ in 0..iterations {
        drop(training.iterate());
    }
    let host = start.elapsed();
    Cuda::synchronize(0);
    let total = start.elapsed();
    let peak = DeviceMemory::read(GPU).unwrap().max_allocated;
    let of_one = |time: std::time::Duration| time.as_secs_f64() * 1e9 / iterations as f64;
    [of_one(total), of_one(host), peak as f64]
}

/// Checks that the losses of both sides agree.
fn check(name: &str, way: Way, weights: &Checkpoint, python: &mut Python) {
    // A graph replays what fp16 computes, from the fourth iteration on.
    let of = if way.name == "graph" { "fp16" } else { way.name };
    let ours = Trained::new(way, name, weights).losses(CHECKED);
    let theirs = python.time(&format!("losses {name} {of} {CHECKED}"));
    let near = |(ours, theirs): (&f64, &f64)| (ours - theirs).abs() <= way.tolerance * theirs.abs();
    let near = ours.iter().zip(&theirs).all(near);
    assert!(near, "{name} in {}: losses {ours:?} here and {theirs:?} in Python", way.name);
}

/// The medians of both sides.
struct Measured {
    way: Way,
    ours: Round,
    python: Option<Round>,
    times: Vec<f64>,
    python_times: Vec<f64>,
}

fn measure(name: &str, way: Way, weights: &Checkpoint, python: &mut Python) -> Measured {
    let (rounds, iterations) =
        if is_quick() { (1, 2) } else { (5, if LARGE.contains(&name) { 10 } else { 100 }) };
    way.set_precision();
    if way.is_in_python || way.name == "graph" {
        check(name, way, weights, python);
    }
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    let mut training = Trained::new(way, name, weights);
    run(&mut training, 4);
    for round in 0..=rounds {
        let mine = run(&mut training, iterations);
        let other = way
            .is_in_python
            .then(|| python.time(&format!("run {name} {} {iterations}", way.name)))
            .map(|numbers| [numbers[0], numbers[1], numbers[2]]);
        // The first round is a warm-up.
        if round > 0 {
            ours.push(mine);
            theirs.extend(other);
        }
    }
    MatmulPrecision::Highest.set().unwrap();
    let of = |rounds: &[Round], i: usize| rounds.iter().map(|round| round[i]).collect::<Vec<_>>();
    let medians = |rounds: &[Round]| [0, 1, 2].map(|i| median(of(rounds, i)));
    Measured {
        way,
        ours: medians(&ours),
        python: (!theirs.is_empty()).then(|| medians(&theirs)),
        times: of(&ours, 0),
        python_times: of(&theirs, 0),
    }
}

fn print(name: &str, all: &[Measured]) {
    let ms = |ns: f64| format!("{:.3}", ns / 1e6);
    for Measured { way, ours, python, .. } in all {
        let or_dash = |f: &dyn Fn(Round) -> String| python.map_or("-".into(), f);
        println!(
            "{name:<11} {:<5} {:>9} {:>9} {:>9} {:>9} {:>8} {:>8} {:>8}",
            way.name,
            ms(ours[0]),
            or_dash(&|python| ms(python[0])),
            ms(ours[1]),
            or_dash(&|python| ms(python[1])),
            format!("{:.0}", ours[2] / 1e6),
            or_dash(&|python| format!("{:.0}", python[2] / 1e6)),
            or_dash(&|python| format!("{:.2}", python[0] / ours[0])),
        );
    }
}

fn main() {
    if !Cuda::is_available() {
        println!("SKIPPED: there is no usable GPU");
        return;
    }
    let Some(mut python) = Python::start("gpu.py") else {
        return;
    };
    let folder = Folder::new();
    let chosen: Vec<_> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let all: Vec<_> = NAMES.into_iter().chain(LARGE).chain([STEP]).collect();
    let is_chosen = |name: &str| {
        // The name of a model chooses this one, and a part of names all that have it.
        let fits = |part: &String| {
            part == name || (!all.contains(&part.as_str()) && name.contains(part.as_str()))
        };
        chosen.is_empty() || chosen.iter().any(fits)
    };
    println!(
        "{:<11} {:<5} {:>9} {:>9} {:>9} {:>9} {:>8} {:>8} {:>8}",
        "model", "", "ms", "Python", "host", "Python", "MB", "Python", "ratio"
    );
    for name in NAMES.into_iter().chain(LARGE) {
        if !is_chosen(name) {
            continue;
        }
        if is_quick() && LARGE.contains(&name) {
            println!("{name} is left out of a trial run: it needs the memory of a GPU");
            continue;
        }
        let file = folder.text(name);
        python.ask(&format!("model {name} {file}"));
        let weights = Checkpoint::load(&file).unwrap();
        let all = WAYS.map(|way| measure(name, way, &weights, &mut python));
        print(name, &all);
        let f32 = all[0].times.clone();
        for Measured { way, times, python_times, .. } in all {
            if !python_times.is_empty() {
                let row = Row::new(name, times.clone(), python_times);
                print_ratio(&format!("gpu_{name}_{}", way.name), row);
            }
            if way.name != "fp32" {
                print_ratio(
                    &format!("gpu_gain_{name}_{}", way.name),
                    Row::new(name, times, f32.clone()),
                );
            }
        }
        drop(std::fs::remove_file(file));
    }
    drop(python);
    if let (true, Some(mut python)) = (is_chosen(STEP), Python::start("masters.py")) {
        states::compare(&mut python, Place { device: GPU, threads: 1, suffix: "_gpu" });
    }
}

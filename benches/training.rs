//! Whole training iterations in f32 and in bf16, compared with Python's `torch.amp` with the same libtorch.
//!
//! An iteration zeroes the gradients, computes the loss (for bf16 inside of a region), runs the backward pass of the
//! scaled loss, steps a fused AdamW and updates the scaler. Both sides start from the same weights and train on the
//! same batch, and their losses are compared first. Python runs twice: with the default environment, and with the
//! environment variables that make glibc keep freed memory, like
//! [`keep_freed_memory`](tch_amp::memory::keep_freed_memory) here. The better of the two results is used.
//!
//! The cost of dynamic loss scaling is the time of scaling the loss, of the optimizer's step and of the scaler's
//! update, minus that of the same step with a disabled scaler, as a percentage of an iteration with that. The two kinds
//! of iterations take turns. One more multiplication of a number in the backward pass is not counted: a backward pass
//! varies by more. jmp's README states 1 to 5 % beside a static loss scale; here it is beside none.
//!
//! A third training here uses the plan that a [`Tuner`](tch_amp::insight::Tuner) measures for the model, and a fourth
//! has weights in bf16 with master weights in f32, which saves the casts of weights and of their gradients.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark fails by panicking")]

mod common;
#[path = "common/folder.rs"]
mod folder;
#[path = "training/iterations.rs"]
mod iterations;
#[path = "training/models.rs"]
mod models;

use common::{Python, Row, is_quick, median, nanoseconds, print_ratio};
use folder::Folder;
use iterations::{PHASES, Training};
use models::NAMES;
use tch::{Device, Kind};
use tch_amp::checkpoint::Checkpoint;
use tch_amp::{Autocast, memory};

/// The number of iterations whose losses are compared.
const CHECKED: usize = 5;

/// The norm to which gradients are clipped where they are.
const MAX_NORM: f64 = 1.0;

/// A region in f32, and one in bf16.
fn region(amp: bool) -> Autocast {
    Autocast::new(Device::Cpu).dtype(Kind::BFloat16).enabled(amp)
}

fn training(name: &str, weights: &Checkpoint, amp: bool) -> Training {
    Training::new(name, weights, Device::Cpu, region(amp), amp)
}

/// Checks that the losses of both sides agree. They differ only where libtorch sums in another order, but for weights in
/// bf16: at first they are their masters, so that updates of less than half of bf16's spacing show some steps later.
fn check(name: &str, weights: &Checkpoint, python: &mut Python) {
    let trainings = [
        (training(name, weights, false), "fp32", [1e-4; 2]),
        (training(name, weights, true), "bf16", [1e-2; 2]),
        (Training::with_masters(name, weights, region(true)), "bf16", [1e-2, 1e-1]),
    ];
    for (mut training, precision, [of_first, of_later]) in trainings {
        let ours: Vec<f64> = (0..CHECKED).map(|_| training.iterate().0.double_value(&[])).collect();
        let theirs = python.ask(&format!("losses {name} {precision} {CHECKED}"));
        let theirs: Vec<f64> = theirs.split(' ').map(|loss| loss.parse().unwrap()).collect();
        for (step, (mine, other)) in ours.iter().zip(&theirs).enumerate() {
            let tolerance = if step == 0 { of_first } else { of_later };
            let near = (mine - other).abs() <= tolerance * other.abs();
            assert!(near, "{name} in {precision}: losses {ours:?} here and {theirs:?} in Python");
        }
    }
}

/// The times of whole iterations.
struct Times {
    /// This crate in bf16, and Python.
    train: Row,
    /// This crate in bf16, and in f32.
    gain: Row,
    /// This crate with a plan, and Python in bf16.
    tuned: Row,
    /// This crate with a plan, and in f32.
    tuned_gain: Row,
    /// This crate with weights in bf16, and Python in bf16.
    masters: Row,
    /// Python in f32, in nanoseconds.
    python_f32: f64,
    /// The phases of an iteration in bf16, in nanoseconds.
    phases: [f64; PHASES],
}

fn time(name: &'static str, weights: &Checkpoint, pythons: &mut [Python; 2]) -> Times {
    let (rounds, iterations) =
        if is_quick() { (1, 1) } else { (9, if name.starts_with("mlp_6") { 60 } else { 3 }) };
    let mut trainings = [false, true].map(|amp| training(name, weights, amp));
    let planned = training(name, weights, true).tuned(name, weights);
    let mut others = [planned, Training::with_masters(name, weights, region(true))];
    // With a plan, and with weights in bf16.
    let mut of_others = [Vec::new(), Vec::new()];
    // In f32 and bf16: this crate's iterations, and those of each Python.
    let mut ours = [Vec::new(), Vec::new()];
    let mut theirs = [[Vec::new(), Vec::new()], [Vec::new(), Vec::new()]];
    let mut phases: Vec<[f64; PHASES]> = Vec::new();
    // The first round is a warm-up.
    for round in 0..=rounds {
        for (i, precision) in ["fp32", "bf16"].into_iter().enumerate() {
            let mut iterate = |_| {
                let mut in_phases = [0.0; PHASES];
                let time = nanoseconds(|| in_phases = trainings[i].iterate().1);
                (time, in_phases)
            };
            let (mine, in_phases): (Vec<_>, Vec<_>) = (0..iterations).map(&mut iterate).unzip();
            let request = format!("run {name} {precision} {iterations}");
            let new = pythons.each_mut().map(|python| python.time(&request));
            if round > 0 {
                ours[i].extend(mine);
                for (all, new) in theirs[i].iter_mut().zip(new) {
                    all.extend(new);
                }
                if i == 1 {
                    phases.extend(in_phases);
                }
            }
        }
        for (all, other) in of_others.iter_mut().zip(&mut others) {
            let mine = (0..iterations).map(|_| nanoseconds(|| drop(other.iterate())));
            let mine: Vec<_> = mine.collect();
            if round > 0 {
                all.extend(mine);
            }
        }
    }
    let [with_plan, masters] = of_others;
    let [f32, bf16] = ours;
    let [python_f32, python_bf16] =
        theirs.map(
            |[plain, keeping]| {
                if median(plain.clone()) < median(keeping.clone()) { plain } else { keeping }
            },
        );
    let phase = |i: usize| median(phases.iter().map(|times| times[i]).collect());
    Times {
        train: Row::new(name, bf16.clone(), python_bf16.clone()),
        gain: Row::new(name, bf16, f32.clone()),
        tuned: Row::new(name, with_plan.clone(), python_bf16.clone()),
        masters: Row::new(name, masters, python_bf16),
        tuned_gain: Row::new(name, with_plan, f32),
        python_f32: median(python_f32),
        phases: std::array::from_fn(phase),
    }
}

/// Prints what dynamic loss scaling costs here and in Python, as a percentage of an iteration in bf16 without it.
fn print_scaling(name: &str, weights: &Checkpoint, python: &mut Python) {
    let count = if is_quick() { 2 } else { 3 * if name.starts_with("mlp_6") { 100 } else { 5 } };
    let mut trainings =
        [false, true].map(|scales| Training::new(name, weights, Device::Cpu, region(true), scales));
    let ours = [None, Some(MAX_NORM)].map(|max_norm| {
        let (mut added, mut totals) = (Vec::new(), Vec::new());
        // The first iterations are a warm-up.
        for iteration in 0..=count {
            let [without, with] = trainings.each_mut().map(|training| {
                training.max_norm = max_norm;
                training.iterate().1
            });
            if iteration > 0 {
                added.push(with[PHASES - 1] - without[PHASES - 1]);
                totals.push(without.iter().sum());
            }
        }
        100.0 * median(added) / median(totals)
    });
    let theirs = python.time(&format!("scaling {name} {count} {MAX_NORM}"));
    println!(
        "{:<12} dynamic loss scaling costs {:.2} % of an iteration, {:.2} % with clipping; in Python {:.2} % and \
         {:.2} %; jmp states 1 to 5 %",
        "", ours[0], ours[1], theirs[0], theirs[1]
    );
}

/// Prints where the time of an iteration in bf16 goes. The shares of the products and the casts are those of an
/// iteration in Python, which runs the same operators, as Python's profiler has measured them. The limit is the ratio
/// that there would be if the optimizer and the scaler took no time: the two passes are libtorch's.
fn print_shares(phases: [f64; PHASES], operators: &[f64], train: &Row) {
    let total = train.ours;
    let percent = |time: f64| 100.0 * time / total;
    let [forward, backward, optimizer] = phases.map(percent);
    let (products, casts) = (100.0 * operators[0], 100.0 * operators[1]);
    let rest = 100.0 - products - casts;
    let limit = train.python / (phases[0] + phases[1]);
    println!(
        "{:<12} in bf16: forward {forward:.0} %, backward {backward:.0} %, optimizer and scaler {optimizer:.0} %; in \
         Python: products {products:.0} %, casts {casts:.0} %, all else {rest:.0} %; limit of train {limit:.2}",
        ""
    );
}

/// Measures a model, and prints all but the ratios, which it returns with their names.
fn measured(
    name: &'static str,
    weights: &Checkpoint,
    pythons: &mut [Python; 2],
) -> [(String, Row); 5] {
    check(name, weights, &mut pythons[0]);
    let times = time(name, weights, pythons);
    let Times { train, gain, tuned, tuned_gain, masters, python_f32, phases } = times;
    let ms = [gain.python, gain.ours, python_f32, train.python].map(|ns| ns / 1e6);
    println!(
        "{name:<12} {:>12.3} {:>12.3} {:>12.3} {:>12.3} {:>8.2} {:>8.2}",
        ms[0],
        ms[1],
        ms[2],
        ms[3],
        train.ratio(),
        gain.ratio()
    );
    print_shares(phases, &pythons[0].time(&format!("profile {name}")), &train);
    print_scaling(name, weights, &mut pythons[0]);
    [
        (format!("train_{name}"), train),
        (format!("gain_{name}"), gain),
        (format!("tuned_{name}"), tuned),
        (format!("tuned_gain_{name}"), tuned_gain),
        (format!("train_{name}_masters"), masters),
    ]
}

fn main() {
    // What `keep_freed_memory` sets.
    let kept = [
        ("MALLOC_TRIM_THRESHOLD_", "-1"),
        ("MALLOC_MMAP_MAX_", "0"),
        ("MALLOC_TOP_PAD_", "67108864"),
    ];
    let Some(plain) = Python::start("training.py") else {
        return;
    };
    let Some(keeping) = Python::start_with("training.py", &kept) else {
        return;
    };
    let mut pythons = [plain, keeping];
    let threads =
        std::env::var("TCH_AMP_BENCH_THREADS").ok().and_then(|n| n.parse().ok()).unwrap_or(1);
    tch::set_num_threads(threads);
    for python in &mut pythons {
        python.ask(&format!("threads {threads}"));
    }
    println!("freed memory is kept: {}", memory::keep_freed_memory());
    let folder = Folder::new();
    println!(
        "{:<12} {:>12} {:>12} {:>12} {:>12} {:>8} {:>8}",
        "ms/iteration", "fp32", "bf16", "Python fp32", "Python bf16", "train", "gain"
    );
    let chosen: Vec<_> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let mut ratios = Vec::new();
    for name in NAMES {
        if !chosen.is_empty() && !chosen.iter().any(|part| name.contains(part.as_str())) {
            continue;
        }
        let file = folder.text(name);
        for python in &mut pythons {
            python.ask(&format!("model {name} {file}"));
        }
        ratios.extend(measured(name, &Checkpoint::load(&file).unwrap(), &mut pythons));
    }
    for (what, row) in ratios {
        print_ratio(&what, row);
    }
}

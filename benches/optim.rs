//! A whole AMP step, compared with Python's GradScaler and fused AdamW, and with tch's own AdamW.
//!
//! Forward and backward are the same work on both sides and are not timed. Each step has new gradients, because
//! unscaling the same ones repeatedly would end at zero.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark fails by panicking")]

mod common;

use common::{
    Python, Rounds, Row, median, microseconds, nanoseconds, print_ratio, print_table, rounds,
    values,
};
use tch::nn::{self, OptimizerConfig as _, VarStore};
use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::GradScaler;
use tch_amp::optim::{AdamW, AmpOptimizer, Optimizer};

/// The number of steps that are compared bit by bit, and the one among them that overflows.
const CHECKED: usize = 20;
const OVERFLOW: usize = 7;

const MAX_NORM: f64 = 1.0;

fn main() {
    let Some(mut python) = Python::start("optim.py") else {
        return;
    };
    tch::set_num_threads(1);
    let theirs = python.ask(&format!("check {CHECKED} {OVERFLOW}"));
    assert_eq!(check(), theirs, "the two sides compute different results");
    small(&mut python, 160, ["amp_step_160x16", "amp_step_clip_160x16"]);
    small(&mut python, 400, ["amp_step_400x16", "amp_step_clip_400x16"]);
    large(&mut python);
    for (numbers, steps) in [(16, 10), (1024, 10), (16384, 5), (65536, 5)] {
        threads(&mut python, numbers, steps);
    }
    against_tch();
}

/// Many small parameters: the cost on the host.
fn small(python: &mut Python, parameters: i64, names: [&str; 2]) {
    let rows = measure(python, parameters, 16, rounds(150), 10);
    print_ratio(names[0], rows[0]);
    print_ratio(names[1], rows[1]);
    println!();
}

/// Large parameters: memory traffic.
fn large(python: &mut Python) {
    const PARAMETERS: i64 = 160;
    const NUMBERS: i64 = 65536;
    let rows = measure(python, PARAMETERS, NUMBERS, rounds(40), 5);
    print_ratio("amp_step_160x65536", rows[0]);
    print_ratio("amp_step_clip_160x65536", rows[1]);
    let numbers = (PARAMETERS * NUMBERS) as f64;
    let copied = copy_bandwidth(PARAMETERS * NUMBERS);
    for (row, reads) in [(rows[0], 5.0), (rows[1], 5.0)] {
        // Reads: the gradient once for the check, then parameter, gradient and two averages. Writes: three of these.
        let bytes = 4.0 * (reads + 3.0);
        let bandwidth = numbers * bytes / row.ours;
        println!(
            "{}: {bytes} bytes moved for each number, {bandwidth:.1} GB/s, {:.0} % of this machine's copy ({copied:.1} GB/s)",
            row.name,
            100.0 * bandwidth / copied
        );
    }
    println!();
}

/// A step on one thread and on all cores.
fn threads(python: &mut Python, numbers: i64, steps: usize) {
    const PARAMETERS: i64 = 160;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut training = Training::new(PARAMETERS, numbers, fused);
    let counts = [1, cores];
    let times = Rounds::run(
        rounds(30),
        || {
            let on = |threads: usize| {
                tch::set_num_threads(threads as i32);
                training.round(steps, Way::Step)
            };
            counts.map(on).to_vec()
        },
        || {
            let mut on = |threads: usize| {
                python.ask(&format!("threads {threads}"));
                python.time(&format!("round {PARAMETERS} {numbers} {steps}"))[0]
            };
            counts.map(&mut on).to_vec()
        },
    );
    tch::set_num_threads(1);
    python.ask("threads 1");
    let rows = [times.row("one thread", 0), times.row("all cores", 1)];
    print_table(
        &format!("{PARAMETERS} x {numbers} numbers, AdamW, on 1 and {cores} threads"),
        &rows,
    );
    let [here, in_python] = [rows[0].ours / rows[1].ours, rows[0].python / rows[1].python];
    println!(
        "{cores} threads are {here:.2} times as fast as one, and in Python {in_python:.2} times"
    );
    print_ratio(&format!("threads_160x{numbers}"), rows[1]);
    println!();
}

/// The bandwidth of copying this many f32 numbers, in GB/s read and written.
fn copy_bandwidth(numbers: i64) -> f64 {
    let from = Tensor::ones([numbers], (Kind::Float, Device::Cpu));
    let mut to = from.zeros_like();
    let times = (0..15).map(|_| nanoseconds(|| to.copy_(&from)));
    8.0 * numbers as f64 / median(times.collect())
}

fn measure(
    python: &mut Python,
    parameters: i64,
    numbers: i64,
    count: usize,
    steps: usize,
) -> Vec<Row> {
    let mut plain = Training::new(parameters, numbers, fused);
    let mut clip = Training::new(parameters, numbers, fused);
    let mut transaction = Training::new(parameters, numbers, fused);
    let times = Rounds::run(
        count,
        || {
            vec![
                plain.round(steps, Way::Step),
                clip.round(steps, Way::Clip),
                transaction.round(steps, Way::Transaction),
            ]
        },
        || python.time(&format!("round {parameters} {numbers} {steps}")),
    );
    let rows = vec![
        times.row("scale, step, update", 0),
        times.row("scale, step_clip_norm, update", 1),
        times.row("scale, unscale, clip_grad_norm, step, update", 2),
    ];
    print_table(&format!("{parameters} x {numbers} numbers, AdamW, {count} rounds"), &rows);
    rows
}

/// This crate's fused AdamW compared with tch's own, for which the scaler reads the overflow flag before each step.
fn against_tch() {
    let mut ours = Training::new(160, 16, fused);
    let mut tchs = Training::new(160, 16, |vs| nn::AdamW::default().build(vs, 1e-3).unwrap());
    let count = rounds(150);
    let times =
        Rounds::run(count, || vec![ours.round(10, Way::Step)], || vec![tchs.round(10, Way::Step)]);
    let row = times.row("scale, step, update", 0);
    println!(
        "160 x 16 numbers, AdamW: fused {}, tch's own {}",
        microseconds(row.ours),
        microseconds(row.python)
    );
    print_ratio("vs_tch_adamw_160x16", row);
}

fn fused(vs: &VarStore) -> Optimizer {
    AdamW::default().build(vs, 1e-3).unwrap()
}

#[derive(Clone, Copy, Debug)]
enum Way {
    Step,
    Clip,
    Transaction,
}

struct Training<O> {
    loss: Tensor,
    params: Vec<Tensor>,
    grads: Vec<Tensor>,
    scaled: Tensor,
    optimizer: O,
    scaler: GradScaler,
}

impl<O: AmpOptimizer> Training<O> {
    fn new(parameters: i64, numbers: i64, optimizer: fn(&VarStore) -> O) -> Self {
        let vs = VarStore::new(Device::Cpu);
        let params: Vec<_> =
            (0..parameters).map(|i| vs.root().add("w", values(i, numbers, 3), true)).collect();
        let optimizer = optimizer(&vs);
        let fresh = values(1, numbers, 5);
        for param in &params {
            (param * &fresh).sum(Kind::Float).backward();
        }
        let grads = params.iter().map(Tensor::grad).collect();
        let scaled = fresh * 65536.0;
        let loss = Tensor::from(1f32).set_requires_grad(true);
        let scaler = GradScaler::new(Device::Cpu).unwrap();
        Self { loss, params, grads, scaled, optimizer, scaler }
    }

    /// Sets new gradients, starting with the last parameter, like backward.
    fn fill(&mut self) {
        no_grad(|| self.grads.iter_mut().rev().for_each(|grad| grad.copy_(&self.scaled)));
    }

    /// The median time of some steps.
    fn round(&mut self, steps: usize, way: Way) -> f64 {
        let times = (0..steps).map(|_| {
            self.fill();
            nanoseconds(|| {
                drop(self.scaler.scale(&self.loss).unwrap());
                self.step(way);
                self.scaler.update().unwrap();
            })
        });
        median(times.collect())
    }

    fn step(&mut self, way: Way) {
        drop(match way {
            Way::Step => self.scaler.step(&mut self.optimizer).unwrap(),
            Way::Clip => self.scaler.step_clip_norm(&mut self.optimizer, MAX_NORM).unwrap(),
            Way::Transaction => {
                let mut unscaled = self.scaler.unscale(&mut self.optimizer).unwrap();
                drop(unscaled.clip_grad_norm(MAX_NORM).unwrap());
                unscaled.step().unwrap()
            }
        });
    }
}

/// The bits of the scale and of the parameters after some steps without clipping.
fn check() -> String {
    let mut training = Training::new(160, 16, fused);
    for step in 0..CHECKED {
        training.fill();
        if step == OVERFLOW {
            no_grad(|| drop(training.grads[3].get(5).fill_(f64::INFINITY)));
        }
        training.step(Way::Step);
        training.scaler.update().unwrap();
    }
    let all = Tensor::cat(&training.params.iter().map(Tensor::detach).collect::<Vec<_>>(), 0);
    let values = Vec::<f32>::try_from(all).unwrap();
    let scale = training.scaler.get_scale().unwrap() as f32;
    std::iter::once(scale).chain(values).map(|value| format!("{:08x}", value.to_bits())).collect()
}

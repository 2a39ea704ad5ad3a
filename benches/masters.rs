//! A step of bf16 parameters with f32 master weights, compared with a Python loop that does the same with operations
//! over lists.
//!
//! Both sides check the gradients, unscale them, update the master weights by AdamW, write the parameters and update
//! the scale. Each step has new gradients. First, the benchmark prints the memory that each mode holds. In the end it
//! times the step alone with low-bit moments.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark fails by panicking")]

mod common;
#[path = "common/master_memory.rs"]
mod held;
#[path = "common/memory.rs"]
mod memory;
#[path = "common/states.rs"]
mod states;

use common::{Python, Rounds, median, nanoseconds, print_ratio, print_table, rounds, values};
use states::Place;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::GradScaler;
use tch_amp::optim::{AdamW, MasterWeights, Optimizer};
use tch_amp::scaler::GradScalerConfig;

/// The number of steps that are compared bit by bit.
const CHECKED: usize = 20;

const SCALE: f64 = 1024.0;

fn main() {
    tch::set_num_threads(1);
    print_memory();
    let Some(mut python) = Python::start("masters.py") else {
        return;
    };
    assert_eq!(
        check(),
        python.ask(&format!("check {CHECKED}")),
        "the two sides compute different results"
    );
    measure(&mut python, 16, rounds(150), 10, "master_weights_step_160x16");
    measure(&mut python, 65536, rounds(40), 5, "master_weights_step_160x65536");
    states::compare(&mut python, Place { device: Device::Cpu, threads: 1, suffix: "" });
}

/// Prints the bytes per number, or nothing if the system does not report the memory.
fn print_memory() {
    // The first measurement allocates what the process then keeps.
    if held::measure(&held::setups()[0]).is_none() {
        return;
    }
    let [title, step, unscaling] = ["bytes for each number", "step", "unscale_"];
    println!("{title:<44} {:>6} {:>6} {step:>6} {unscaling:>8} {:>6}", "stated", "held", "later");
    for setup in held::setups() {
        let Some(held) = held::measure(&setup) else { return };
        let held::Held { held, step, unscaling, later } = held;
        let (name, stated) = (setup.name, setup.stated);
        println!("{name:<44} {stated:>6.2} {held:>6.2} {step:>6.2} {unscaling:>8.2} {later:>6.2}");
    }
    println!();
}

fn measure(python: &mut Python, numbers: i64, count: usize, steps: usize, name: &str) {
    let modes = [
        MasterWeights::Float,
        MasterWeights::Remainder,
        MasterWeights::StochasticRounding { seed: 1 },
    ];
    let mut trainings = modes.map(|masters| Training::new(numbers, masters));
    let times = Rounds::run(
        count,
        || trainings.iter_mut().map(|training| training.round(steps)).collect(),
        || {
            let time = python.time(&format!("round 160 {numbers} {steps}"))[0];
            vec![time; 3]
        },
    );
    let rows = vec![
        times.row("f32 copies", 0),
        times.row("remainders", 1),
        times.row("stochastic rounding", 2),
    ];
    print_table(&format!("160 x {numbers} numbers in bf16, AdamW, {count} rounds"), &rows);
    print_ratio(name, rows[0]);
    println!();
}

struct Training {
    loss: Tensor,
    params: Vec<Tensor>,
    grads: Vec<Tensor>,
    fresh: Tensor,
    optimizer: Optimizer,
    scaler: GradScaler,
}

impl Training {
    fn new(numbers: i64, masters: MasterWeights) -> Self {
        let mut vs = VarStore::new(Device::Cpu);
        let params: Vec<_> =
            (0..160).map(|i| vs.root().add("w", values(i, numbers, 3), true)).collect();
        vs.bfloat16();
        let adam = AdamW::default();
        let optimizer = adam.master_weights(masters).build(&vs, 1e-3).unwrap();
        let fresh = (values(1, numbers, 5) * SCALE).to_kind(Kind::BFloat16);
        for param in &params {
            (param * &fresh).sum(Kind::BFloat16).backward();
        }
        let grads = params.iter().map(Tensor::grad).collect();
        let loss = Tensor::from(1f32).set_requires_grad(true);
        let config = GradScalerConfig { init_scale: SCALE, ..Default::default() };
        let scaler = config.build(Device::Cpu).unwrap();
        Self { loss, params, grads, fresh, optimizer, scaler }
    }

    /// Sets new gradients, starting with the last parameter, like backward.
    fn fill(&mut self) {
        no_grad(|| self.grads.iter_mut().rev().for_each(|grad| grad.copy_(&self.fresh)));
    }

    fn step(&mut self) {
        drop(self.scaler.scale(&self.loss).unwrap());
        drop(self.scaler.step(&mut self.optimizer).unwrap());
        self.scaler.update().unwrap();
    }

    /// The median time of some steps.
    fn round(&mut self, steps: usize) -> f64 {
        let times = (0..steps).map(|_| {
            self.fill();
            nanoseconds(|| self.step())
        });
        median(times.collect())
    }
}

/// The bits of the parameters after some steps.
fn check() -> String {
    let mut training = Training::new(16, MasterWeights::Float);
    for _ in 0..CHECKED {
        training.fill();
        training.step();
    }
    let all = Tensor::cat(&training.params.iter().map(Tensor::detach).collect::<Vec<_>>(), 0);
    let halves = Vec::<i64>::try_from(all.view_dtype(Kind::Int16).to_kind(Kind::Int64)).unwrap();
    halves.into_iter().map(|half| format!("{:04x}", half as u16)).collect()
}

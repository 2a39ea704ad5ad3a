//! The time that gradient scaling adds to a training iteration, compared with Python.
//!
//! The result is only the added time: that of an iteration with `scale`, `unscale_`, `step` and `update`, minus that of
//! the optimizer's plain step. Forward and backward are the same work on both sides and are not timed. Each iteration
//! has new gradients, because unscaling the same ones repeatedly would end at zero.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark fails by panicking")]

mod common;

use common::{
    Python, Rounds, Row, median, microseconds, nanoseconds, print_ratio, print_table, rounds,
};
use tch::nn::{self, OptimizerConfig as _, VarStore};
use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::GradScaler;

const PARAMETERS: i64 = 160;
const NUMBERS: i64 = 16;
const ITERATIONS: usize = 25;

/// The number of iterations that are compared bit by bit, and the one among them that overflows.
const CHECKED: usize = 20;
const OVERFLOW: usize = 7;

fn main() {
    let Some(mut python) = Python::start("scaler.py") else {
        return;
    };
    tch::set_num_threads(1);
    assert_eq!(
        check(),
        python.ask(&format!("check {CHECKED} {OVERFLOW}")),
        "the two sides compute different results"
    );
    let count = rounds(200);
    let mut training = Training::new();
    let times =
        Rounds::run(count, || training.round(), || python.time(&format!("round {ITERATIONS}")));
    let added = times.row("added by scaling", ADDED);
    let rows = [times.row("plain step", PLAIN), times.row("iteration with scaling", SCALED), added];
    print_table(&format!("{PARAMETERS} x {NUMBERS} numbers, SGD, {count} rounds"), &rows);
    print_phases(&times, added);
    print_ratio("scaler_overhead_160", added);
}

/// Indices into the times of a round, the same as in Python.
const PLAIN: usize = 0;
const SCALED: usize = 1;
const ADDED: usize = 2;
const SCALE: usize = 3;
const UNSCALE: usize = 4;
const DECISION: usize = 5;
const UPDATE: usize = 6;

fn print_phases(times: &Rounds, added: Row) {
    let share = |name, index| {
        let row = times.row(name, index);
        println!(
            "  {name:<14} {:>12} {:>5.1} %",
            microseconds(row.ours),
            100.0 * row.ours / added.ours
        );
    };
    println!("the added time by phase, tch-amp");
    share("scale", SCALE);
    share("unscale_", UNSCALE);
    share("step decision", DECISION);
    share("update", UPDATE);
    println!();
}

struct Training {
    loss: Tensor,
    params: Vec<Tensor>,
    grads: Vec<Tensor>,
    fresh: Vec<Tensor>,
    scaled: Vec<Tensor>,
    optimizer: nn::Optimizer,
    scaler: GradScaler,
}

impl Training {
    fn new() -> Self {
        let vs = VarStore::new(Device::Cpu);
        let params =
            (0..PARAMETERS).map(|i| vs.root().add("w", numbers(i, 3), true)).collect::<Vec<_>>();
        let optimizer = nn::sgd(0.0, 0.0, 0.0, false).build(&vs, 1e-3).unwrap();
        let fresh = (0..PARAMETERS).map(|i| numbers(i, 5)).collect::<Vec<_>>();
        let scaled = fresh.iter().map(|grad| grad * 65536.0).collect();
        let products =
            params.iter().zip(&fresh).map(|(param, grad)| (param * grad).sum(Kind::Float));
        products.fold(Tensor::from(0f32), |sum, product| sum + product).backward();
        let grads = params.iter().map(Tensor::grad).collect();
        let loss = Tensor::from(1f32).set_requires_grad(true);
        let scaler = GradScaler::new(Device::Cpu).unwrap();
        Self { loss, params, grads, fresh, scaled, optimizer, scaler }
    }

    fn round(&mut self) -> Vec<f64> {
        let mut iterations = Vec::new();
        for _ in 0..ITERATIONS {
            fill(&mut self.grads, &self.fresh);
            let plain = nanoseconds(|| self.optimizer.step());
            fill(&mut self.grads, &self.scaled);
            let scale = nanoseconds(|| drop(self.scaler.scale(&self.loss).unwrap()));
            let unscale = nanoseconds(|| self.scaler.unscale_(&mut self.optimizer).unwrap());
            let step = nanoseconds(|| drop(self.scaler.step(&mut self.optimizer).unwrap()));
            let update = nanoseconds(|| self.scaler.update().unwrap());
            let scaled = scale + unscale + step + update;
            iterations.push([plain, scaled, scaled - plain, scale, unscale, step - plain, update]);
        }
        (0..7).map(|index| median(iterations.iter().map(|times| times[index]).collect())).collect()
    }
}

fn fill(grads: &mut [Tensor], values: &[Tensor]) {
    no_grad(|| grads.iter_mut().zip(values).for_each(|(grad, value)| grad.copy_(value)));
}

/// Multiples of 1/8, the same as in Python.
fn numbers(parameter: i64, factor: i64) -> Tensor {
    let values = (0..NUMBERS)
        .map(|j| ((parameter * factor + j * 11) % 64 - 32) as f32 / 8.0)
        .collect::<Vec<_>>();
    Tensor::from_slice(&values)
}

/// The bits of the scale and of the parameters after some iterations, with and without an explicit `unscale_`.
fn check() -> String {
    let mut training = Training::new();
    for iteration in 0..CHECKED {
        fill(&mut training.grads, &training.scaled);
        if iteration == OVERFLOW {
            no_grad(|| drop(training.grads[3].get(5).fill_(f64::INFINITY)));
        }
        if iteration % 2 == 1 {
            training.scaler.unscale_(&mut training.optimizer).unwrap();
        }
        let outcome = training.scaler.step(&mut training.optimizer).unwrap();
        assert_eq!(outcome.is_skipped().unwrap(), iteration == OVERFLOW);
        training.scaler.update().unwrap();
    }
    let all = Tensor::cat(&training.params.iter().map(Tensor::detach).collect::<Vec<_>>(), 0);
    let values = Vec::<f32>::try_from(all).unwrap();
    let scale = training.scaler.get_scale().unwrap() as f32;
    std::iter::once(scale).chain(values).map(|value| format!("{:08x}", value.to_bits())).collect()
}

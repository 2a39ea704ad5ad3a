//! A window of four micro-batches and its step, compared with Python's loop, which multiplies each loss by its share.
//! Python cannot leave out a micro-batch, so `backward_or_drop` is compared with the same loop.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark fails by panicking")]

mod common;

use common::{Python, Rounds, median, nanoseconds, print_ratio, print_table, rounds, values};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};
use tch_amp::GradScaler;
use tch_amp::accumulation::Accumulation;
use tch_amp::optim::{Optimizer, Sgd};

/// The numbers of tokens of the micro-batches.
const TOKENS: [f64; 4] = [5.0, 3.0, 7.0, 1.0];
/// How many windows are compared bit by bit.
const CHECKED: usize = 5;
/// Gradients are multiplied by it without rounding, so that the order of the operations of a step makes no difference.
const LR: f64 = 1.0 / 1024.0;

fn main() {
    let Some(mut python) = Python::start("accumulation.py") else {
        return;
    };
    tch::set_num_threads(1);
    let theirs = python.ask(&format!("check 6 32 {CHECKED}"));
    for drops in [false, true] {
        let ours = Training::new(6, 32).bits(CHECKED, drops);
        assert_eq!(ours, theirs, "the two sides compute different results, dropping: {drops}");
    }
    measure(&mut python, (160, 4), 10);
    measure(&mut python, (40, 256), 3);
}

/// Square matrices, whose losses are linear.
struct Training {
    params: Vec<Tensor>,
    batches: Vec<Tensor>,
    optimizer: Optimizer,
    scaler: GradScaler,
}

impl Training {
    fn new(parameters: i64, width: i64) -> Self {
        let vs = VarStore::new(Device::Cpu);
        let matrix = |i: i64, factor: i64| values(i, width * width, factor).view([width, width]);
        let params = (0..parameters).map(|i| vs.root().add("w", matrix(i, 3), true)).collect();
        let batches = (0..TOKENS.len() as i64).map(|i| matrix(i, 5)).collect();
        let optimizer = Sgd::default().build(&vs, LR).unwrap();
        Self { params, batches, optimizer, scaler: GradScaler::new(Device::Cpu).unwrap() }
    }

    /// The time of the backward passes of a window and of its step.
    fn window(&mut self, drops: bool) -> f64 {
        self.optimizer.zero_grad().unwrap();
        let loss = |batch: &Tensor| {
            let sums = self.params.iter().map(|param| (param * batch).sum(Kind::Float));
            Tensor::stack(&sums.collect::<Vec<_>>(), 0).sum(Kind::Float)
        };
        let losses: Vec<_> = self.batches.iter().map(loss).collect();
        let Self { optimizer, scaler, .. } = self;
        nanoseconds(|| {
            let mut window = Accumulation::of_weights(TOKENS).unwrap();
            for loss in &losses {
                match drops {
                    true => window.backward_or_drop(scaler, optimizer, loss).unwrap(),
                    false => window.backward(scaler, loss).unwrap(),
                }
            }
            scaler.step(optimizer).unwrap();
            scaler.update().unwrap();
        })
    }

    /// The median time of some windows.
    fn round(&mut self, windows: usize, drops: bool) -> f64 {
        median((0..windows).map(|_| self.window(drops)).collect())
    }

    /// The bits of the parameters after some windows.
    fn bits(mut self, windows: usize, drops: bool) -> String {
        for _ in 0..windows {
            self.window(drops);
        }
        let all = Tensor::stack(&self.params.iter().map(Tensor::detach).collect::<Vec<_>>(), 0);
        let values = Vec::<f32>::try_from(all.view(-1)).unwrap();
        values.iter().map(|value| format!("{:08x}", value.to_bits())).collect()
    }
}

fn measure(python: &mut Python, (parameters, width): (i64, i64), windows: usize) {
    let [mut plain, mut dropping] = [(); 2].map(|()| Training::new(parameters, width));
    let count = rounds(60);
    let times = Rounds::run(
        count,
        || vec![plain.round(windows, false), dropping.round(windows, true)],
        || {
            let time = python.time(&format!("round {parameters} {width} {windows}"));
            vec![time[0]; 2]
        },
    );
    let rows = [times.row("backward", 0), times.row("backward_or_drop", 1)];
    print_table(&format!("{parameters} matrices of {width} x {width}, {count} rounds"), &rows);
    for row in rows {
        print_ratio(&format!("{}_{parameters}x{width}", row.name), row);
    }
    println!();
}

//! Steps of RMSprop, NAdam, Adafactor and Muon, and updates of averaged weights, compared with Python's. PyTorch has neither Lion nor a
//! search for spikes, whose steps are printed alone.
//!
//! Python has its fastest implementation of RMSprop, `foreach=True`, and one call for all averages. Of NAdam and
//! Adafactor it has the one whose bits are those of this crate, `foreach=False`.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark fails by panicking")]

mod common;

use common::{
    Python, Rounds, median, microseconds, nanoseconds, print_ratio, print_table, rounds, values,
};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::GradScaler;
use tch_amp::average::{AveragedWeights, Ema};
use tch_amp::optim::{Adafactor, Lion, Muon, NAdam, Optimizer, RmsProp};
use tch_amp::scaler::SpikeConfig;

/// How many steps are compared bit by bit.
const CHECKED: usize = 5;
const DECAY: f64 = 0.99;

fn main() {
    let Some(mut python) = Python::start("pieces.py") else {
        return;
    };
    tch::set_num_threads(1);
    for piece in [Piece::RmsProp, Piece::NAdam, Piece::Adafactor, Piece::Muon, Piece::Ema] {
        let theirs = python.ask(&format!("check {} 6 32 {CHECKED}", piece.name()));
        let ours = Training::new(piece, 6, 32).bits(CHECKED);
        assert_eq!(ours, theirs, "{}: the two sides compute different results", piece.name());
    }
    measure(&mut python, Piece::RmsProp, (160, 4), 10);
    measure(&mut python, Piece::RmsProp, (40, 256), 5);
    for piece in [Piece::NAdam, Piece::Adafactor] {
        measure(&mut python, piece, (160, 4), 10);
        measure(&mut python, piece, (40, 256), 5);
    }
    measure(&mut python, Piece::Ema, (160, 4), 10);
    measure(&mut python, Piece::Ema, (40, 256), 5);
    measure(&mut python, Piece::Muon, (12, 32), 5);
    measure(&mut python, Piece::Muon, (12, 256), 2);
    let mut lion = Training::new(Piece::Lion, 40, 256);
    let times = (0..rounds(30)).map(|_| lion.round(5)).collect();
    println!("Lion, 40 matrices of 256 x 256: {}", microseconds(median(times)));
    spikes(160, 4);
    spikes(40, 256);
}

/// What it costs to look for spikes, beside a step that clips to the same norm.
fn spikes(parameters: i64, width: i64) {
    let [mut clipped, mut watched] =
        [(); 2].map(|()| Training::new(Piece::RmsProp, parameters, width));
    let mut detector = SpikeConfig::default().build().unwrap();
    let mut times = [const { Vec::new() }; 2];
    for _ in 0..10 * rounds(30) {
        clipped.fill();
        times[0].push(nanoseconds(|| {
            clipped.scaler.step_clip_norm(&mut clipped.optimizer, 1.0).unwrap();
        }));
        clipped.scaler.update().unwrap();
        watched.fill();
        times[1].push(nanoseconds(|| {
            let Training { scaler, optimizer, .. } = &mut watched;
            scaler.step_unless_spike(optimizer, 1.0, &mut detector).unwrap();
        }));
        watched.scaler.update().unwrap();
    }
    let [clipped, watched] = times.map(|times| microseconds(median(times)));
    println!(
        "{parameters} matrices of {width} x {width}: step_clip_norm {clipped}, step_unless_spike {watched}"
    );
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Piece {
    RmsProp,
    NAdam,
    Adafactor,
    Lion,
    Muon,
    Ema,
}

impl Piece {
    fn name(self) -> &'static str {
        match self {
            Self::RmsProp => "rmsprop",
            Self::NAdam => "nadam",
            Self::Adafactor => "adafactor",
            Self::Lion => "lion",
            Self::Muon => "muon",
            Self::Ema => "ema",
        }
    }

    fn optimizer(self, vs: &VarStore) -> Optimizer {
        let built = match self {
            Self::RmsProp | Self::Ema => RmsProp::default().build(vs, 1e-3),
            Self::NAdam => NAdam::default().build(vs, 1e-3),
            Self::Adafactor => Adafactor::default().build(vs, 1e-3),
            Self::Lion => Lion::default().build(vs, 1e-3),
            Self::Muon => Muon::default().build(vs, 1e-3),
        };
        built.unwrap()
    }
}

/// Square matrices with gradients that are filled in.
struct Training {
    piece: Piece,
    loss: Tensor,
    params: Vec<Tensor>,
    grads: Vec<Tensor>,
    scaled: Tensor,
    optimizer: Optimizer,
    average: AveragedWeights,
    scaler: GradScaler,
}

impl Training {
    fn new(piece: Piece, parameters: i64, width: i64) -> Self {
        let vs = VarStore::new(Device::Cpu);
        let matrix = |i: i64, factor: i64| values(i, width * width, factor).view([width, width]);
        let params: Vec<_> =
            (0..parameters).map(|i| vs.root().add("w", matrix(i, 3), true)).collect();
        let optimizer = piece.optimizer(&vs);
        let average = Ema { decay: DECAY, ..Ema::default() }.build(&vs).unwrap();
        let fresh = matrix(1, 5);
        for param in &params {
            (param * &fresh).sum(Kind::Float).backward();
        }
        let grads = params.iter().map(Tensor::grad).collect();
        let loss = Tensor::from(1f32).set_requires_grad(true);
        let scaler = GradScaler::new(Device::Cpu).unwrap();
        Self { piece, loss, params, grads, scaled: fresh * 65536.0, optimizer, average, scaler }
    }

    fn fill(&mut self) {
        no_grad(|| self.grads.iter_mut().rev().for_each(|grad| grad.copy_(&self.scaled)));
    }

    fn step(&mut self) {
        drop(self.scaler.scale(&self.loss).unwrap());
        self.scaler.step(&mut self.optimizer).unwrap();
        self.scaler.update().unwrap();
    }

    /// The median time of some steps, or of the updates of the averages after them.
    fn round(&mut self, steps: usize) -> f64 {
        let times = (0..steps).map(|_| {
            self.fill();
            let step = nanoseconds(|| self.step());
            match self.piece {
                Piece::Ema => nanoseconds(|| self.average.advance().unwrap()),
                _ => step,
            }
        });
        median(times.collect())
    }

    /// The bits of the parameters, or of the averages, after some steps.
    fn bits(mut self, steps: usize) -> String {
        for _ in 0..steps {
            self.fill();
            self.step();
            self.average.advance().unwrap();
        }
        if self.piece == Piece::Ema {
            self.average.copy_to_model().unwrap();
        }
        let all = Tensor::stack(&self.params.iter().map(Tensor::detach).collect::<Vec<_>>(), 0);
        let values = Vec::<f32>::try_from(all.view(-1)).unwrap();
        values.iter().map(|value| format!("{:08x}", value.to_bits())).collect()
    }
}

fn measure(python: &mut Python, piece: Piece, (parameters, width): (i64, i64), steps: usize) {
    let mut training = Training::new(piece, parameters, width);
    let count = rounds(30);
    let name = piece.name();
    let times = Rounds::run(
        count,
        || vec![training.round(steps)],
        || python.time(&format!("round {name} {parameters} {width} {steps}")),
    );
    let row = times.row(name, 0);
    print_table(&format!("{parameters} matrices of {width} x {width}, {count} rounds"), &[row]);
    print_ratio(&format!("{name}_{parameters}x{width}"), row);
    println!();
}

//! The steps that several benchmarks time.
#![allow(dead_code, reason = "each benchmark uses its own part")]

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::GradScaler;
use tch_amp::optim::{AdamW, AmpOptimizer, Optimizer};

use super::common::{Python, median, nanoseconds, values};

/// The number of steps that are compared bit by bit, and the one among them that overflows.
const CHECKED: usize = 20;
const OVERFLOW: usize = 7;

const MAX_NORM: f64 = 1.0;

pub fn fused(vs: &VarStore) -> Optimizer {
    AdamW::default().build(vs, 1e-3).unwrap()
}

#[derive(Clone, Copy, Debug)]
pub enum Way {
    Step,
    Clip,
    Transaction,
}

pub struct Training<O> {
    loss: Tensor,
    params: Vec<Tensor>,
    grads: Vec<Tensor>,
    scaled: Tensor,
    optimizer: O,
    scaler: GradScaler,
}

impl<O: AmpOptimizer> Training<O> {
    pub fn new(parameters: i64, numbers: i64, optimizer: fn(&VarStore) -> O) -> Self {
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
    pub fn round(&mut self, steps: usize, way: Way) -> f64 {
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

/// Compares the results of both sides bit by bit.
pub fn check(python: &mut Python) {
    let theirs = python.ask(&format!("check {CHECKED} {OVERFLOW}"));
    assert_eq!(bits(), theirs, "the two sides compute different results");
}

/// The bits of the scale and of the parameters after some steps without clipping.
fn bits() -> String {
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

//! The steps that several benchmarks time.
#![allow(dead_code, reason = "each benchmark uses its own part")]

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::GradScaler;
use tch_amp::optim::{AdamW, AmpOptimizer, Optimizer};

use super::common::{median, nanoseconds, values};

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
    pub params: Vec<Tensor>,
    pub grads: Vec<Tensor>,
    scaled: Tensor,
    optimizer: O,
    pub scaler: GradScaler,
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
    pub fn fill(&mut self) {
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

    pub fn step(&mut self, way: Way) {
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

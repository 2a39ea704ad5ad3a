//! An optimizer of a program: tch's SGD or the AdamW of these tests.

use tch::nn::{self, OptimizerConfig as _, VarStore};
use tch::{COptimizer, Device, Tensor};
use tch_amp::Result;
use tch_amp::optim::{AmpOptimizer, Parameters, Step};

use crate::scaler::programs::adamw::AdamW;
use crate::scaler::programs::program::{OptimizerSpec, ParamSpec, Rule, from_eighths};

/// An optimizer and its parameters.
#[derive(Debug)]
pub struct Optimizer {
    kind: OptimizerKind,
    pub owned: Vec<Tensor>,
    /// How many steps the scaler has taken with it.
    pub calls: usize,
}

#[derive(Debug)]
enum OptimizerKind {
    Tch(nn::Optimizer),
    AdamW(AdamW),
}

impl Optimizer {
    /// Makes the optimizer and those of its parameters that are not among the `known` ones, to which it adds them.
    pub fn new(spec: &OptimizerSpec, device: Device, known: &mut Vec<Tensor>) -> Self {
        let vs = VarStore::new(device);
        let mut owned = Vec::new();
        for param in &spec.params {
            let tensor = match param {
                ParamSpec::New { dtype, eighths } => {
                    from_eighths(eighths, dtype.kind()).to_device(device)
                }
                ParamSpec::Shared(number) => known[*number].shallow_clone(),
            };
            owned.push(vs.root().add("w", tensor, true));
            if matches!(param, ParamSpec::New { .. }) {
                known.extend(owned.last().map(Tensor::shallow_clone));
            }
        }
        let kind = match spec.rule {
            Rule::Sgd { lr, momentum, dampening, weight_decay, nesterov } => {
                let sgd = nn::sgd(momentum, dampening, weight_decay, nesterov);
                OptimizerKind::Tch(sgd.build(&vs, lr).unwrap())
            }
            Rule::AdamW { lr, beta1, beta2, weight_decay } => OptimizerKind::AdamW(AdamW::new(
                vs.trainable_variables(),
                lr,
                beta1,
                beta2,
                weight_decay,
            )),
        };
        Self { kind, owned, calls: 0 }
    }

    fn has_no_grads(&self) -> bool {
        !self.owned.iter().any(|param| param.grad().defined())
    }

    pub fn zero_grad(&mut self) {
        match &mut self.kind {
            OptimizerKind::Tch(optimizer) => optimizer.zero_grad(),
            OptimizerKind::AdamW(_) => self.owned.iter().for_each(drop_gradient),
        }
    }

    pub fn zero_in_place(&self) {
        self.owned.iter().for_each(|param| param.shallow_clone().zero_grad());
    }

    /// tch's clipping by norm, which the oracle computes in the same way.
    pub fn clip_grad_norm(&self, max: f64) {
        if self.has_no_grads() {
            return; // where tch would panic
        }
        match &self.kind {
            OptimizerKind::Tch(optimizer) => optimizer.clip_grad_norm(max),
            OptimizerKind::AdamW(_) => clip_grad_norm(&self.owned, max),
        }
    }

    pub fn clip_grad_value(&self, max: f64) {
        for param in &self.owned {
            let mut grad = param.grad();
            if grad.defined() {
                let _grad = grad.clamp_(-max, max);
            }
        }
    }
}

impl AmpOptimizer for Optimizer {
    fn parameters(&self) -> Parameters<'_> {
        match &self.kind {
            OptimizerKind::Tch(optimizer) => AmpOptimizer::parameters(optimizer),
            OptimizerKind::AdamW(optimizer) => optimizer.parameters(),
        }
    }

    fn update(&mut self, step: &Step<'_>) -> Result<()> {
        self.calls += 1;
        match &mut self.kind {
            OptimizerKind::Tch(optimizer) => optimizer.update(step),
            OptimizerKind::AdamW(optimizer) => optimizer.update(step),
        }
    }
}

fn clip_grad_norm(params: &[Tensor], max: f64) {
    let mut grads = params.iter().map(Tensor::grad).filter(Tensor::defined).collect::<Vec<_>>();
    let norms = grads.iter().map(Tensor::norm).collect::<Vec<_>>();
    let factor = max / (f64::try_from(Tensor::stack(&norms, 0).norm()).unwrap() + 1e-6);
    if factor < 1.0 {
        for grad in &mut grads {
            let _grad = grad.g_mul_scalar_(factor);
        }
    }
}

/// Drops the gradient of one parameter: tch can only drop those of a whole optimizer, so this creates one for it.
pub fn drop_gradient(param: &Tensor) {
    let mut optimizer = COptimizer::sgd(0.0, 0.0, 0.0, 0.0, false).unwrap();
    optimizer.add_parameters(param, 0).unwrap();
    optimizer.zero_grad().unwrap();
}

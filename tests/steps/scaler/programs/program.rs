//! The parts of a program.

use tch::{Kind, Tensor};

/// A model with its optimizers, a scaler, and operations on them.
#[derive(Clone, Debug)]
pub struct Program {
    pub enabled: bool,
    pub config: Config,
    pub optimizers: Vec<OptimizerSpec>,
    pub ops: Vec<Op>,
}

impl Program {
    /// Whether optimizers have parameters in common.
    pub fn shares(&self) -> bool {
        let mut all = self.optimizers.iter().flat_map(|optimizer| &optimizer.params);
        all.any(|param| matches!(param, ParamSpec::Shared(_)))
    }
}

/// The configuration of a scaler.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    pub init_scale: f64,
    pub growth_factor: f64,
    pub backoff_factor: f64,
    pub growth_interval: i64,
}

#[derive(Clone, Debug)]
pub struct OptimizerSpec {
    pub rule: Rule,
    pub params: Vec<ParamSpec>,
}

impl OptimizerSpec {
    /// The numbers of its parameters, of which `known` are those of the optimizers before.
    pub fn owned(&self, known: &mut usize) -> Vec<usize> {
        let number = |param: &ParamSpec| match param {
            ParamSpec::New { .. } => {
                *known += 1;
                *known - 1
            }
            ParamSpec::Shared(number) => *number,
        };
        self.params.iter().map(number).collect()
    }
}

#[derive(Clone, Copy, Debug)]
pub enum Rule {
    Sgd { lr: f64, momentum: f64, dampening: f64, weight_decay: f64, nesterov: bool },
    AdamW { lr: f64, beta1: f64, beta2: f64, weight_decay: f64 },
}

#[derive(Clone, Debug)]
pub enum ParamSpec {
    /// With values that are multiples of 1/8.
    New { dtype: Dtype, eighths: Vec<i32> },
    /// A parameter of an optimizer before.
    Shared(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    Float,
    Double,
    BFloat16,
}

/// How one optimizer's gradients are clipped between unscaling and stepping.
#[derive(Clone, Copy, Debug)]
pub enum Clip {
    Not,
    Norm(f64),
    Value(f64),
}

/// The loss term `(param * eighths / 8).sum()`.
#[derive(Clone, Debug)]
pub struct Term {
    pub param: usize,
    pub eighths: Vec<i32>,
}

#[derive(Clone, Copy, Debug)]
pub enum How {
    /// `scaler.backward(&loss)`
    Backward,
    /// `scaler.scale(&loss)?.backward()`
    Scale,
    /// `scaler.scale(&(first, rest))?`, and a backward for each
    Each,
}

/// One operation. Parameters are numbered across all optimizers, shared ones once.
#[derive(Clone, Debug)]
pub enum Op {
    Backward {
        how: How,
        terms: Vec<Term>,
    },
    Plant {
        param: usize,
        element: usize,
        value: f64,
    },
    Drop {
        param: usize,
    },
    ZeroGrad {
        optimizer: usize,
    },
    /// Zeroes the gradients in place.
    Zeros {
        optimizer: usize,
    },
    Unscale {
        optimizer: usize,
    },
    ClipNorm {
        optimizer: usize,
        max_norm: f64,
    },
    ClipValue {
        optimizer: usize,
        max: f64,
    },
    Step {
        optimizer: usize,
    },
    /// `scaler.unscale(&mut optimizer)?`, clip and `step()`; several are open at once.
    Transaction(Vec<(usize, Clip)>),
    /// Moves the optimizers to other addresses.
    Move,
    Update,
    UpdateWith(f64),
    UpdateWithTensor(f64),
    SetGrowthFactor(f64),
    SetBackoffFactor(f64),
    SetGrowthInterval(i64),
    /// Saves the scaler's state, builds another scaler, and loads the state into it.
    Reload(Config),
}

/// The numbers `eighths / 8`, exact in every dtype.
pub fn from_eighths(eighths: &[i32], kind: Kind) -> Tensor {
    let values = eighths.iter().map(|&eighth| f64::from(eighth) / 8.0).collect::<Vec<_>>();
    Tensor::from_slice(&values).to_kind(kind)
}

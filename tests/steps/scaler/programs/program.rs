//! The parts of a program, which the oracle reads as JSON.

use serde::{Serialize, Serializer};
use tch::{Kind, Tensor};

/// A model with its optimizers, a scaler, and operations on them.
#[derive(Clone, Debug, Serialize)]
pub struct Program {
    pub enabled: bool,
    pub config: Config,
    pub optimizers: Vec<OptimizerSpec>,
    pub ops: Vec<Op>,
}

impl Program {
    /// A line for the oracle: whether the devices are GPUs, and the program.
    pub fn line(&self, on_gpus: bool) -> String {
        serde_json::to_string(&(on_gpus, self)).unwrap()
    }

    /// Whether optimizers have parameters in common.
    pub fn shares(&self) -> bool {
        let mut all = self.optimizers.iter().flat_map(|optimizer| &optimizer.params);
        all.any(|param| matches!(param, ParamSpec::Shared(_)))
    }
}

/// The configuration of a scaler.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Config {
    pub init_scale: f64,
    pub growth_factor: f64,
    pub backoff_factor: f64,
    pub growth_interval: i64,
}

#[derive(Clone, Debug, Serialize)]
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

#[derive(Clone, Copy, Debug, Serialize)]
pub enum Rule {
    Sgd { lr: f64, momentum: f64, dampening: f64, weight_decay: f64, nesterov: bool },
    AdamW { lr: f64, beta1: f64, beta2: f64, weight_decay: f64 },
}

#[derive(Clone, Debug, Serialize)]
pub enum ParamSpec {
    /// With values that are multiples of 1/8.
    New { dtype: Dtype, eighths: Vec<i32> },
    /// A parameter of an optimizer before.
    Shared(usize),
}

#[derive(Clone, Copy, Debug, Serialize)]
pub enum Dtype {
    Float,
    Double,
    BFloat16,
}

impl Dtype {
    pub fn kind(self) -> Kind {
        match self {
            Self::Float => Kind::Float,
            Self::Double => Kind::Double,
            Self::BFloat16 => Kind::BFloat16,
        }
    }
}

/// How one optimizer's gradients are clipped between unscaling and stepping.
#[derive(Clone, Copy, Debug, Serialize)]
pub enum Clip {
    Not,
    Norm(f64),
    Value(f64),
}

/// The loss term `(param * eighths / 8).sum()`.
#[derive(Clone, Debug, Serialize)]
pub struct Term {
    pub param: usize,
    pub eighths: Vec<i32>,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub enum How {
    /// `scaler.backward(&loss)`
    Backward,
    /// `scaler.scale(&loss)?.backward()`
    Scale,
    /// `scaler.scale(&(first, rest))?`, and a backward for each
    Each,
}

/// One operation. Parameters are numbered across all optimizers, shared ones once.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Op {
    Backward { how: How, terms: Vec<Term> },
    Plant { param: usize, element: usize, value: Planted },
    Drop { param: usize },
    ZeroGrad { optimizer: usize },
    // Zeroes the gradients in place.
    Zeros { optimizer: usize },
    Unscale { optimizer: usize },
    ClipNorm { optimizer: usize, max_norm: f64 },
    ClipValue { optimizer: usize, max: f64 },
    Step { optimizer: usize },
    // `scaler.unscale(&mut optimizer)?`, clip and `step()`; several are open at once.
    Transaction { parts: Vec<(usize, Clip)> },
    // Moves the optimizers to other addresses.
    Move,
    Update,
    UpdateWith { scale: f64 },
    UpdateWithTensor { scale: f64 },
    SetGrowthFactor { factor: f64 },
    SetBackoffFactor { factor: f64 },
    SetGrowthInterval { interval: i64 },
    // Saves the scaler's state, builds another scaler, and loads the state into it.
    Reload { config: Config },
}

/// A number that may be infinite or NaN, which the oracle reads as text because JSON has none of these.
#[derive(Clone, Copy, Debug)]
pub struct Planted(pub f64);

impl Serialize for Planted {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

/// The numbers `eighths / 8`, exact in every dtype.
pub fn from_eighths(eighths: &[i32], kind: Kind) -> Tensor {
    let values = eighths.iter().map(|&eighth| f64::from(eighth) / 8.0).collect::<Vec<_>>();
    Tensor::from_slice(&values).to_kind(kind)
}

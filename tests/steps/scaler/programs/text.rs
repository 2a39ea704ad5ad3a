//! The text form of a program, which the oracle reads.

use std::fmt::{self, Display};

use crate::scaler::programs::program::{
    Clip, Config, Dtype, How, Op, OptimizerSpec, ParamSpec, Program, Rule, Term,
};

impl Program {
    /// One line: the type of the devices, the scaler, the number of optimizers, the optimizers, and the operations.
    pub fn line(&self, on_gpus: bool) -> String {
        let device = if on_gpus { "cuda" } else { "cpu" };
        let mut fields = vec![format!("{device} {} {}", u8::from(self.enabled), self.config)];
        fields.push(self.optimizers.len().to_string());
        fields.extend(self.optimizers.iter().map(ToString::to_string));
        fields.extend(self.ops.iter().map(ToString::to_string));
        fields.join(";")
    }
}

impl Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { init_scale, growth_factor, backoff_factor, growth_interval } = self;
        write!(f, "{init_scale:?} {growth_factor:?} {backoff_factor:?} {growth_interval}")
    }
}

impl Display for OptimizerSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.rule {
            Rule::Sgd { lr, momentum, dampening, weight_decay, nesterov } => {
                write!(
                    f,
                    "sgd {lr:?} {momentum:?} {dampening:?} {weight_decay:?} {}",
                    u8::from(nesterov)
                )?;
            }
            Rule::AdamW { lr, beta1, beta2, weight_decay } => {
                write!(f, "adamw {lr:?} {beta1:?} {beta2:?} {weight_decay:?}")?;
            }
        }
        for param in &self.params {
            match param {
                ParamSpec::New { dtype, eighths } => {
                    write!(f, "|{} {}", dtype.name(), join(eighths, " "))?;
                }
                ParamSpec::Shared(number) => write!(f, "|shared {number}")?,
            }
        }
        Ok(())
    }
}

impl Dtype {
    fn name(self) -> &'static str {
        match self {
            Self::Float => "f32",
            Self::Double => "f64",
            Self::BFloat16 => "bf16",
        }
    }
}

impl Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Backward { how, terms } => write!(f, "backward {how} {}", join(terms, " ")),
            Self::Plant { param, element, value } => write!(f, "plant {param} {element} {value:?}"),
            Self::Drop { param } => write!(f, "drop {param}"),
            Self::ZeroGrad { optimizer } => write!(f, "zero {optimizer}"),
            Self::Zeros { optimizer } => write!(f, "zeros {optimizer}"),
            Self::Unscale { optimizer } => write!(f, "unscale {optimizer}"),
            Self::ClipNorm { optimizer, max_norm } => write!(f, "norm {optimizer} {max_norm:?}"),
            Self::ClipValue { optimizer, max } => write!(f, "value {optimizer} {max:?}"),
            Self::Step { optimizer } => write!(f, "step {optimizer}"),
            Self::Transaction(parts) => {
                write!(f, "transaction")?;
                parts.iter().try_for_each(|(optimizer, clip)| write!(f, " {optimizer}:{clip}"))
            }
            Self::Move => write!(f, "move"),
            Self::Update => write!(f, "update"),
            Self::UpdateWith(scale) => write!(f, "update_with {scale:?}"),
            Self::UpdateWithTensor(scale) => write!(f, "update_with_tensor {scale:?}"),
            Self::SetGrowthFactor(factor) => write!(f, "growth {factor:?}"),
            Self::SetBackoffFactor(factor) => write!(f, "backoff {factor:?}"),
            Self::SetGrowthInterval(interval) => write!(f, "interval {interval}"),
            Self::Reload(config) => write!(f, "reload {config}"),
        }
    }
}

impl Display for How {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Backward => "backward",
            Self::Scale => "scale",
            Self::Each => "each",
        })
    }
}

impl Display for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.param, join(&self.eighths, ","))
    }
}

impl Display for Clip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Not => f.write_str("not:0"),
            Self::Norm(max) => write!(f, "norm:{max:?}"),
            Self::Value(max) => write!(f, "value:{max:?}"),
        }
    }
}

fn join<T: Display>(items: &[T], separator: &str) -> String {
    items.iter().map(ToString::to_string).collect::<Vec<_>>().join(separator)
}

//! Losses and layers that keep less for the backward pass than the operators that they replace. Their results and
//! gradients differ from those of the operators by rounding at most.
//!
//! The logits of a language model are its largest activation: tokens times words. Autocast computes them in half
//! precision, `cross_entropy` makes them f32 and keeps a tensor of their size, and its backward pass makes two more.
//! [`linear_cross_entropy`] takes the place of the last linear layer and the loss. It keeps the logits once, in the
//! dtype of the product, and turns them into their own gradient in place; or, within [`max_bytes`], only a block of
//! them.
//!
//! Activations and normalizations take much of the rest of a transformer's memory: they keep their input, and the
//! linear layer behind them keeps their result. [`activation_linear`] and [`norm_linear`] take the place of such a
//! pair, and keep only the input.
//!
//! On CUDA these functions have run on simulated GPUs only, and on no real one.
//!
//! # Examples
//!
//! ```
//! use tch::nn::{self, Module};
//! use tch::{Device, Kind, Tensor};
//! use tch_amp::autocast;
//! use tch_amp::lean::{LinearCrossEntropyConfig, linear_cross_entropy};
//!
//! let vs = nn::VarStore::new(Device::Cpu);
//! let body = nn::linear(vs.root() / "body", 8, 16, Default::default());
//! let head = nn::linear(vs.root() / "head", 16, 100, Default::default());
//! let xs = Tensor::randn([4, 32, 8], (Kind::Float, Device::Cpu));
//! let targets = Tensor::randint(100, [4, 32], (Kind::Int64, Device::Cpu));
//! let loss = autocast(Device::Cpu, || {
//!     let hidden = body.forward(&xs).relu();
//!     // Instead of `head.forward(&hidden).view([-1, 100]).cross_entropy_for_logits(&targets.view([-1]))`.
//!     let config = LinearCrossEntropyConfig::default();
//!     linear_cross_entropy(&hidden, &head.ws, head.bs.as_ref(), &targets, &config)
//! })??;
//! assert_eq!(loss.kind(), Kind::Float);
//! loss.backward();
//! # Ok::<(), tch_amp::Error>(())
//! ```
//!
//! [`max_bytes`]: LinearCrossEntropyConfig::max_bytes

mod cross_entropy;
mod linear_of;

use std::iter;

use tch::{Kind, Tensor};

use crate::autocast::is_autocast_enabled;
use crate::error::{Error, Result};
use crate::ffi;

pub use cross_entropy::{LinearCrossEntropyConfig, linear_cross_entropy, token_log_probs};
pub use linear_of::{Activation, NormConfig, NormKind, activation_linear, norm_linear};

fn invalid(name: &'static str, problem: String) -> Error {
    Error::InvalidArgument { name, problem }
}

/// Fails unless the argument is a dense floating-point tensor.
fn check_floating(name: &'static str, tensor: &Tensor) -> Result<()> {
    check_dense(name, tensor)?;
    let kind = tensor.f_kind()?;
    match ffi::dtype_code(kind) {
        Some(_) => Ok(()),
        None => Err(invalid(name, format!("must be a floating-point tensor, not {kind:?}"))),
    }
}

fn check_dense(name: &'static str, tensor: &Tensor) -> Result<()> {
    if tensor.defined() && ffi::is_dense(tensor)? {
        return Ok(());
    }
    let problem = "must be a dense tensor: one that is defined, and neither sparse nor nested";
    Err(invalid(name, problem.to_owned()))
}

/// The operands of a linear layer by their names: what it is of, its weight and its bias.
struct Linear<'a> {
    input: (&'static str, &'a Tensor),
    weight: &'a Tensor,
    bias: Option<&'a Tensor>,
}

impl Linear<'_> {
    fn all(&self) -> impl Iterator<Item = (&'static str, &Tensor)> {
        let others = [Some(("weight", self.weight)), self.bias.map(|bias| ("bias", bias))];
        iter::once(self.input).chain(others.into_iter().flatten())
    }

    /// Fails unless the layer is one of dense floating-point tensors on one device, of which the input has rows of
    /// `width` numbers.
    fn check(&self, width: i64) -> Result<()> {
        for (name, tensor) in self.all() {
            check_floating(name, tensor)?;
            check_device(name, tensor, self.input)?;
        }
        let (rows, outputs) = (self.input.1.size(), self.weight.size());
        if outputs.len() != 2 || outputs[1] != width || width == 0 || outputs[0] == 0 {
            let problem = format!(
                "must have the shape [outputs, {width}] for {} of {rows:?}, not {outputs:?}",
                self.input.0
            );
            return Err(invalid("weight", problem));
        }
        if let Some(bias) = self.bias.filter(|bias| bias.size() != [outputs[0]]) {
            let problem = format!("must have the shape [{}], not {:?}", outputs[0], bias.size());
            return Err(invalid("bias", problem));
        }
        self.check_dtypes()
    }

    /// Fails unless the product can have one dtype: outside of a region nothing is cast, and inside of one f64 is not.
    fn check_dtypes(&self) -> Result<()> {
        let (name, input) = self.input;
        let kind = input.f_kind()?;
        let is_cast = is_autocast_enabled(input.device());
        for (other_name, tensor) in self.all() {
            let other = tensor.f_kind()?;
            let is_wide = |kind| kind == Kind::Double;
            let fits = if is_cast { is_wide(kind) == is_wide(other) } else { kind == other };
            if !fits {
                return Err(other_dtype(other_name, other, (name, kind)));
            }
        }
        Ok(())
    }
}

fn other_dtype(name: &'static str, own: Kind, (other, kind): (&str, Kind)) -> Error {
    let problem = format!(
        "is {own:?}, and {other} {kind:?}: give them one dtype, or compute in an autocast region, which casts all but f64"
    );
    invalid(name, problem)
}

/// The last dimension of a tensor.
fn width_of(name: &'static str, tensor: &Tensor) -> Result<i64> {
    let problem = || invalid(name, "must have a last dimension, its width".to_owned());
    tensor.size().last().copied().ok_or_else(problem)
}

fn check_device(name: &'static str, tensor: &Tensor, other: (&str, &Tensor)) -> Result<()> {
    if tensor.device() == other.1.device() {
        return Ok(());
    }
    let problem = format!("is on {:?}, and {} on {:?}", tensor.device(), other.0, other.1.device());
    Err(invalid(name, problem))
}

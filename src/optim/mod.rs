//! The optimizers that a scaler can step.

#![forbid(unsafe_code)]

use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};

use tch::Tensor;
use tch::nn::Optimizer;

use crate::error::{Error, Result};
use crate::panics;

/// An optimizer that a [`GradScaler`](crate::GradScaler) can step: it names its parameters and takes a step. In PyTorch,
/// `torch.optim.Optimizer` is that.
///
/// Implemented for [`tch::nn::Optimizer`]. One's own takes a few lines:
///
/// ```
/// use tch::Tensor;
/// use tch_amp::{AmpOptimizer, Parameters, Result};
///
/// struct SignSgd { weights: Vec<Tensor>, lr: f64 }
///
/// impl AmpOptimizer for SignSgd {
///     fn parameters(&self) -> Parameters<'_> { self.weights.as_slice().into() }
///     fn step(&mut self) -> Result<()> {
///         tch::no_grad(|| for w in &mut self.weights { let g = w.grad(); *w -= g.sign() * self.lr; });
///         Ok(())
///     }
/// }
/// ```
pub trait AmpOptimizer {
    /// Returns every tensor that [`step`](Self::step) may change, always in the same order. The scaler recognises an
    /// optimizer by them, so it may be moved freely.
    fn parameters(&self) -> Parameters<'_>;

    /// Changes the parameters by their gradients, which are finite and unscaled. The scaler calls it only for a step
    /// that is taken.
    ///
    /// # Errors
    ///
    /// Whatever went wrong, for instance as [`Error::Optimizer`]; the scaler hands it on.
    fn step(&mut self) -> Result<()>;

    /// Returns the name of the parameter at `index`, for messages, where the optimizer knows it. It must not use the
    /// scaler, which is at work.
    fn parameter_name(&self, _index: usize) -> Option<String> {
        None
    }
}

/// The parameters of an optimizer: its own list, or one made for the occasion.
#[derive(Debug)]
pub struct Parameters<'a>(List<'a>);

#[derive(Debug)]
enum List<'a> {
    Borrowed(&'a [Tensor]),
    Owned(Vec<Tensor>),
}

impl Parameters<'_> {
    /// The list as one that outlives the optimizer's borrow. Clones handles, not numbers.
    pub(crate) fn into_owned(self) -> Vec<Tensor> {
        match self.0 {
            List::Borrowed(tensors) => tensors.iter().map(Tensor::shallow_clone).collect(),
            List::Owned(tensors) => tensors,
        }
    }
}

impl<'a> From<&'a [Tensor]> for Parameters<'a> {
    fn from(tensors: &'a [Tensor]) -> Self {
        Self(List::Borrowed(tensors))
    }
}

impl From<Vec<Tensor>> for Parameters<'_> {
    fn from(tensors: Vec<Tensor>) -> Self {
        Self(List::Owned(tensors))
    }
}

impl Deref for Parameters<'_> {
    type Target = [Tensor];

    fn deref(&self) -> &[Tensor] {
        match &self.0 {
            List::Borrowed(tensors) => tensors,
            List::Owned(tensors) => tensors,
        }
    }
}

impl AmpOptimizer for Optimizer {
    /// Returns the trainable variables of the VarStore, those that were added after the optimizer was built included:
    /// its step takes them up, too.
    fn parameters(&self) -> Parameters<'_> {
        self.trainable_variables().into()
    }

    fn step(&mut self) -> Result<()> {
        // tch's own `step` has no fallible twin and panics with libtorch's message.
        catch_unwind(AssertUnwindSafe(|| Optimizer::step(self)))
            .map_err(|panic| Error::Optimizer(panics::into_message(panic).into()))
    }
}

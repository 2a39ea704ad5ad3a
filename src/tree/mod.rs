//! Trees of tensors: a tensor, or a tuple, list, option or map of trees.

mod collections;
mod tuples;

use tch::{Kind, Tensor};

use crate::error::{Error, PolicyError, Result};

/// A structure of tensors that a [`Policy`](crate::Policy) can cast and a [`LossScale`](crate::loss_scale::LossScale)
/// can scale: a tensor, or a tuple, slice, array, `Vec`, `Option`, `Box` or map of trees. The counterpart of a pytree
/// in JAX.
///
/// Implement it for your own types by delegating to a tuple of their fields:
///
/// ```
/// use tch::Tensor;
/// use tch_amp::{Policy, Result};
/// use tch_amp::tree::Tree;
///
/// struct Layer {
///     weight: Tensor,
///     bias: Option<Tensor>,
/// }
///
/// impl Tree for Layer {
///     type Output = Self;
///
///     fn try_map(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
///         let (weight, bias) = (&self.weight, &self.bias).try_map(f)?;
///         Ok(Self { weight, bias })
///     }
///
///     fn try_zip(
///         &self,
///         other: &Self,
///         f: &mut dyn FnMut(&Tensor, &Tensor) -> Result<Tensor>,
///     ) -> Result<Self> {
///         let other = (&other.weight, &other.bias);
///         let (weight, bias) = (&self.weight, &self.bias).try_zip(&other, f)?;
///         Ok(Self { weight, bias })
///     }
///
///     fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor)) {
///         self.weight.visit(f);
///         self.bias.visit(f);
///     }
/// }
///
/// let layer = Layer { weight: Tensor::from(1f32), bias: None };
/// let half = Policy::BF16.cast_to_param(&layer)?;
/// assert_eq!(half.weight.kind(), tch::Kind::BFloat16);
/// # Ok::<(), tch_amp::Error>(())
/// ```
pub trait Tree {
    /// The owned tree of the same structure, for instance `Vec<Tensor>` for `[Tensor]`.
    type Output;

    /// Applies `f` to each tensor and returns a tree of the results with the same structure.
    ///
    /// # Errors
    ///
    /// The first error of `f`.
    fn try_map(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self::Output>;

    /// Applies `f` to each pair of tensors at the same place of two trees and returns a tree of the results.
    ///
    /// # Errors
    ///
    /// [`PolicyError::TreeMismatch`] if the structures differ, and the first error of `f`.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::Tensor;
    /// use tch_amp::tree::Tree;
    ///
    /// let (weights, gradients) = ((Tensor::from(1f32), vec![Tensor::from(2f32)]), (Tensor::from(4f32), vec![]));
    /// let step = &mut |w: &Tensor, g: &Tensor| Ok(w - g * 0.5);
    /// let (a, b) = weights.try_zip(&weights, step)?;
    /// assert_eq!((a, b[0].double_value(&[])), (Tensor::from(0.5f32), 1.0));
    /// let other = weights.try_zip(&gradients, step).map_err(|error| error.to_string());
    /// assert_eq!(other, Err("the trees differ at `root.1`: 1 elements in the first and 0 in the second".to_owned()));
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    fn try_zip(
        &self,
        other: &Self,
        f: &mut dyn FnMut(&Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<Self::Output>;

    /// Calls `f` with each tensor.
    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor));
}

/// Returns the tensors of a tree, without undefined ones such as the gradient of an unused parameter.
pub(crate) fn leaves<T: Tree + ?Sized>(tree: &T) -> Vec<&Tensor> {
    let mut leaves = Vec::new();
    tree.visit(&mut |tensor| {
        if tensor.defined() {
            leaves.push(tensor);
        }
    });
    leaves
}

/// Prepends a step to the place of a mismatch, which was found one level below.
fn at<T>(result: Result<T>, step: impl FnOnce() -> String) -> Result<T> {
    result.map_err(|error| match error {
        Error::Policy(PolicyError::TreeMismatch { place, problem }) => {
            Error::Policy(PolicyError::TreeMismatch { place: step() + &place, problem })
        }
        other => other,
    })
}

/// Creates a mismatch at the current place.
pub(crate) fn mismatch(problem: String) -> Error {
    Error::Policy(PolicyError::TreeMismatch { place: String::new(), problem })
}

/// Returns a tensor's kind; `None` if it is undefined or if tch does not support its kind.
pub(crate) fn kind(tensor: &Tensor) -> Option<Kind> {
    tensor.defined().then(|| tensor.f_kind().ok()).flatten()
}

/// Returns a tensor's kind if it is a floating-point one.
pub(crate) fn floating_kind(tensor: &Tensor) -> Option<Kind> {
    let kind = kind(tensor)?;
    let floating = matches!(
        kind,
        Kind::Half
            | Kind::BFloat16
            | Kind::Float
            | Kind::Double
            | Kind::Float8e5m2
            | Kind::Float8e4m3fn
            | Kind::Float8e5m2fnuz
            | Kind::Float8e4m3fnuz
    );
    floating.then_some(kind)
}

impl Tree for Tensor {
    type Output = Tensor;

    fn try_map(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        f(self)
    }

    fn try_zip(
        &self,
        other: &Self,
        f: &mut dyn FnMut(&Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        f(self, other)
    }

    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor)) {
        f(self);
    }
}

//! Trees of tensors: one tensor, or tuples, lists, options and maps of trees.

mod collections;
mod tuples;

use tch::{Kind, Tensor};

use crate::error::{Error, PolicyError, Result};

/// What a [`Policy`](crate::Policy) casts and a [`LossScale`](crate::loss_scale::LossScale) scales: a tensor, or a tuple, slice,
/// array, `Vec`, `Option`, `Box` or map of such. The twin of a pytree in JAX.
///
/// A structure of your own joins in by naming its parts:
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
    /// The owned tree of the same structure that a map makes: `Vec<Tensor>` for `[Tensor]`, for instance.
    type Output;

    /// Makes a tree of the same structure of what `f` makes of each tensor.
    ///
    /// # Errors
    ///
    /// The first error of `f`.
    fn try_map(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor>) -> Result<Self::Output>;

    /// Makes a tree of what `f` makes of each two tensors that stand in the same place.
    ///
    /// # Errors
    ///
    /// [`PolicyError::TreeMismatch`] where the structures differ, and the first error of `f`.
    fn try_zip(
        &self,
        other: &Self,
        f: &mut dyn FnMut(&Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<Self::Output>;

    /// Shows each tensor to `f`.
    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor));
}

/// The tensors of a tree, but for undefined ones, such as the gradient of a parameter that was not used.
pub(crate) fn leaves<T: Tree + ?Sized>(tree: &T) -> Vec<&Tensor> {
    let mut leaves = Vec::new();
    tree.visit(&mut |tensor| {
        if tensor.defined() {
            leaves.push(tensor);
        }
    });
    leaves
}

/// A mismatch one step further from the root: `step` leads to where it was found.
fn at<T>(result: Result<T>, step: impl FnOnce() -> String) -> Result<T> {
    result.map_err(|error| match error {
        Error::Policy(PolicyError::TreeMismatch { place, problem }) => {
            Error::Policy(PolicyError::TreeMismatch { place: step() + &place, problem })
        }
        other => other,
    })
}

/// A mismatch here.
pub(crate) fn mismatch(problem: String) -> Error {
    Error::Policy(PolicyError::TreeMismatch { place: String::new(), problem })
}

/// A tensor's kind. Undefined tensors have none, nor do those of kinds that tch does not know.
pub(crate) fn kind(tensor: &Tensor) -> Option<Kind> {
    tensor.defined().then(|| tensor.f_kind().ok()).flatten()
}

/// A tensor's floating kind, where it has one.
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

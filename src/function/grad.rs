//! The gradients of chosen tensors.

use std::borrow::Borrow;

use tch::Tensor;

#[cfg(doc)]
use crate::error::FunctionError;
use crate::error::{Error, Result};
use crate::ffi;

/// How [`grad`] computes gradients, with the defaults of `torch.autograd.grad`.
///
/// # Examples
///
/// The gradient of a gradient:
///
/// ```
/// use tch::Tensor;
/// use tch_amp::function::{GradConfig, grad};
///
/// let x = Tensor::from(3f64).set_requires_grad(true);
/// let differentiable = GradConfig { create_graph: true, ..Default::default() };
/// let first = grad(&[x.pow_tensor_scalar(3)], &[&x], &differentiable)?.remove(0);
/// let second = grad(&[first.unwrap()], &[&x], &GradConfig::default())?.remove(0);
/// assert_eq!(second, Some(Tensor::from(18f64)));
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct GradConfig<'a> {
    /// The gradient of a loss with respect to each output: the vector of the vector-Jacobian product. It has the
    /// output's shape. `None` stands for a one, and the output must then have one element. An empty slice, the default,
    /// stands for `None` for every output.
    pub grad_outputs: &'a [Option<&'a Tensor>],
    /// Whether the graph can be used again. Defaults to `None`, which stands for the value of `create_graph`.
    pub retain_graph: Option<bool>,
    /// Whether the gradients can be differentiated in turn. Defaults to `false`.
    pub create_graph: bool,
    /// Whether the outputs need not depend on every input. The gradient of one on which they do not depend is `None`.
    /// Defaults to `false`, which makes it an error.
    pub allow_unused: bool,
}

/// Computes and returns the sum of gradients of the outputs with respect to the inputs, one for each input, and
/// accumulates none in a leaf. The counterpart of `torch.autograd.grad`.
///
/// The outputs are tensors with a graph, such as a loss; the inputs are leaves or results within that graph. A gradient
/// has the shape, the dtype and the device of its input. `None` is returned for an input on which the outputs do not
/// depend, with [`allow_unused`](GradConfig::allow_unused) only; without it, `into_iter().flatten()` gives the tensors.
/// Does not synchronize.
///
/// Like `backward()`, the computation has the autocast state of the thread that calls it, so that inside a region
/// autocast casts the operands of its products, but for those of operators that a rule keeps in f32. Call it outside of
/// regions, as PyTorch recommends for `backward()`.
///
/// Use it instead of tch's `Tensor::run_backward`, which ends the process if an output has no graph, and sums an output
/// of several elements.
///
/// As in PyTorch, a gradient may share memory with one of `grad_outputs` or with another gradient: do not change it in
/// place.
///
/// # Errors
///
/// - [`FunctionError::NoGraph`] for an output that does not require a gradient.
/// - [`FunctionError::GradOutput`] for an output without a gradient in `grad_outputs` that has not one element or is
///   complex, and for a gradient that has another shape than its output, or is complex where that is real.
/// - [`FunctionError::NoGradient`] for an input that does not require a gradient.
/// - [`FunctionError::Unused`] for an input on which the outputs do not depend. The graph can still be used, unless
///   they depend on it only through a custom function that has returned no gradient for it.
/// - [`Error::InvalidArgument`] for an undefined tensor, for a list without tensors, and for `grad_outputs` of another
///   length than the outputs. PyTorch ignores the gradients for which there is no output.
/// - [`Error::Torch`] if the computation fails: the graph has been freed, for instance, or a tensor that it needs was
///   changed in place, or the backward of a custom function has failed or panicked.
///
/// # Examples
///
/// ```
/// use tch::Tensor;
/// use tch_amp::function::{GradConfig, grad};
///
/// let x = Tensor::from_slice(&[1f32, 2.0]).set_requires_grad(true);
/// let y = &x * &x;
/// let v = Tensor::from_slice(&[1f32, 10.0]);
/// let gradients = grad(&[&y], &[&x], &GradConfig { grad_outputs: &[Some(&v)], ..Default::default() })?;
/// assert_eq!(gradients, [Some(Tensor::from_slice(&[2f32, 40.0]))]);
/// assert!(!x.grad().defined());
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[doc(alias = "run_backward")]
pub fn grad<T, U>(
    outputs: &[T],
    inputs: &[U],
    config: &GradConfig<'_>,
) -> Result<Vec<Option<Tensor>>>
where
    T: Borrow<Tensor>,
    U: Borrow<Tensor>,
{
    let outputs: Vec<&Tensor> = outputs.iter().map(Borrow::borrow).collect();
    let inputs: Vec<&Tensor> = inputs.iter().map(Borrow::borrow).collect();
    let refused = |name, problem| Err(Error::InvalidArgument { name, problem });
    for (name, count) in [("outputs", outputs.len()), ("inputs", inputs.len())] {
        if count == 0 {
            return refused(name, "is empty; give at least one tensor".to_owned());
        }
    }
    let (given, count) = (config.grad_outputs.len(), outputs.len());
    if given != 0 && given != count {
        let problem = format!(
            "has {given} elements, and `outputs` has {count}; give a gradient or `None` for each, or an empty slice"
        );
        return refused("grad_outputs", problem);
    }
    let none = vec![None; if given == 0 { count } else { 0 }];
    ffi::grad(&ffi::GradCall {
        outputs: &outputs,
        grad_outputs: if given == 0 { &none } else { config.grad_outputs },
        inputs: &inputs,
        retain_graph: config.retain_graph.unwrap_or(config.create_graph),
        create_graph: config.create_graph,
        allow_unused: config.allow_unused,
    })
}

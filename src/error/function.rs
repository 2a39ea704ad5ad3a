//! Errors of custom autograd functions, of their checks, and of gradients of chosen tensors.

use crate::error::BoxError;
use crate::error::text::{Number, chain};

/// The errors of custom autograd functions, of their checks, and of [`grad`](crate::function::grad()).
///
/// # Examples
///
/// ```
/// use tch::Tensor;
/// use tch_amp::function::FunctionError;
/// use tch_amp::{Error, function};
///
/// let root = function(
///     |_, x| if x[0].f_min()?.f_double_value(&[])? < 0.0 { Err("negative".into()) } else { Ok(x[0].f_sqrt()?) },
///     |_, grads| Ok(grads[0].shallow_clone()),
/// ).name("root");
/// let failed = root.apply(&[Tensor::from_slice(&[4f32, -1.0])]);
/// assert!(matches!(&failed, Err(Error::Function(FunctionError::Forward { name, .. })) if name == "root"));
/// assert!(failed.is_err_and(|error| error.to_string() == "root: forward failed: negative"));
/// ```
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum FunctionError {
    /// The forward of a custom function failed. The message contains the causes, which `source()` therefore does not
    /// return.
    #[error("{name}: forward failed: {}", chain(&**cause))]
    Forward {
        /// The function.
        name: String,
        /// The error that the forward returned.
        cause: BoxError,
    },

    /// A custom function does not fit its inputs, misused its context, or was refused by libtorch. Its forward has
    /// already run, unless the number of gradients or the dtype of `cast_inputs` is wrong.
    #[error("{name}: {problem}")]
    Misuse {
        /// The function.
        name: String,
        /// The problem.
        problem: String,
    },

    /// The function has no input of this index.
    #[error("there is no input {input}: the function was given {inputs}")]
    NoSuchInput {
        /// The index.
        input: usize,
        /// The number of inputs.
        inputs: usize,
    },

    /// A backward asked for something that its forward did not save.
    #[error("backward asked for {wanted}, but forward saved {saved}")]
    NotSaved {
        /// The value for which the backward asked.
        wanted: String,
        /// The value that the forward saved instead.
        saved: String,
    },

    /// The gradient that the backward computes differs from that of finite differences.
    #[error(
        "the gradient of output {output} {output_index:?} with respect to input {input} {input_index:?} is {} by backward and {} by finite differences: correct the backward, or loosen atol and rtol",
        Number(*analytic),
        Number(*numeric)
    )]
    GradientMismatch {
        /// The input.
        input: usize,
        /// The element of the input.
        input_index: Vec<i64>,
        /// The output.
        output: usize,
        /// The element of the output.
        output_index: Vec<i64>,
        /// The gradient of the backward.
        analytic: f64,
        /// The gradient of finite differences.
        numeric: f64,
    },

    /// The function cannot be checked with these inputs, or not at all.
    #[error("cannot check the gradient: {problem}")]
    NotCheckable {
        /// The reason, and what to do.
        problem: String,
    },

    /// The backward returned other gradients when it was run again on the same graph.
    #[error(
        "backward is nondeterministic: it returned other gradients for output {output} when it was run again, and cannot be checked"
    )]
    NondeterministicBackward {
        /// The output.
        output: usize,
    },

    /// An output whose gradients are wanted has no graph. Nothing was computed.
    #[error(
        "output {output} has no graph, because it does not require a gradient: compute it from tensors that do, and not under `no_grad`"
    )]
    NoGraph {
        /// The output.
        output: usize,
    },

    /// The gradient of an output, which `grad_outputs` gives or which is a one, does not fit the output. Nothing was
    /// computed.
    #[error("the gradient of output {output} {problem}")]
    GradOutput {
        /// The output.
        output: usize,
        /// The problem, and its remedy.
        problem: String,
    },

    /// An input whose gradient is wanted does not require one. Nothing was computed.
    #[error(
        "input {input} does not require a gradient: call set_requires_grad(true) on it before the outputs are computed"
    )]
    NoGradient {
        /// The input.
        input: usize,
    },

    /// The outputs do not depend on an input whose gradient is wanted.
    #[error(
        "the outputs do not depend on input {input}, or their backward returns no gradient for it: leave it out, or set `allow_unused`"
    )]
    Unused {
        /// The input.
        input: usize,
    },
}

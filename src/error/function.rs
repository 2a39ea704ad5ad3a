//! Errors of custom autograd functions and of their checks.

use crate::error::BoxError;
use crate::error::text::{Number, chain};

/// Why a custom autograd function was not applied, or did not pass its check.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FunctionError {
    /// The forward of a custom function failed. The message holds the causes, which `source()` does not return again.
    #[error("{name}: forward failed: {}", chain(&**cause))]
    Forward {
        /// The function.
        name: String,
        /// What forward returned.
        cause: BoxError,
    },

    /// A custom function does not fit what it was applied to, or told its context what is not so, or libtorch refused
    /// to record it. Its forward has run, unless the number of gradients or the dtype of `cast_inputs` is what is
    /// wrong.
    #[error("{name}: {problem}")]
    Misuse {
        /// The function.
        name: String,
        /// What is wrong.
        problem: String,
    },

    /// A function has no such input.
    #[error("there is no input {input}: the function was given {inputs}")]
    NoSuchInput {
        /// The index that was asked for.
        input: usize,
        /// How many inputs there are.
        inputs: usize,
    },

    /// A backward asked for what its forward did not save.
    #[error("backward asked for {wanted}, but forward saved {saved}")]
    NotSaved {
        /// What backward asked for.
        wanted: String,
        /// What there is of it.
        saved: String,
    },

    /// The gradient that backward computes is not that of finite differences.
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
        /// What backward computed.
        analytic: f64,
        /// What finite differences say.
        numeric: f64,
    },

    /// A function cannot be checked with these inputs, or not at all.
    #[error("cannot check the gradient: {problem}")]
    NotCheckable {
        /// What is in the way.
        problem: String,
    },

    /// A backward gave another gradient when it was run again on the same graph.
    #[error(
        "backward answered differently when it was run again for output {output}: only a deterministic one can be checked"
    )]
    NondeterministicBackward {
        /// The output.
        output: usize,
    },
}

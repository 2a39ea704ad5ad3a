//! The errors of precision policies and trees of tensors.

use tch::Kind;

/// The errors of precision policies and trees of tensors.
///
/// # Examples
///
/// ```
/// use tch_amp::policy::PolicyError;
/// use tch_amp::{Error, Policy};
///
/// let read = "compute=int8".parse::<Policy>();
/// assert!(matches!(&read, Err(Error::Policy(PolicyError::Text { text, .. })) if text == "compute=int8"));
/// // The message says what is allowed.
/// assert!(read.is_err_and(|error| error.to_string().contains("dtypes are float32 (f32,")));
/// ```
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// The text is not the name of a level of mixed precision.
    #[error("there is no level `{text}`: write O0, O1, O2 or O3")]
    LevelText {
        /// The text.
        text: String,
    },

    /// The text cannot be parsed as a policy.
    #[error(
        "cannot read the policy `{text}`: {problem}; write for example `params=float32,compute=bfloat16,output=float32`, `p=f32,c=f16`, `bf16`, `half` or `O1`"
    )]
    Text {
        /// The text.
        text: String,
        /// The problem, and the values that are allowed.
        problem: String,
    },

    /// A field of the policy is not one of the dtypes that a policy can cast to: f32, fp16, bf16 and f64.
    #[error(
        "the {field} dtype of a policy cannot be {kind:?}: use Kind::Float, Kind::Half, Kind::BFloat16 or Kind::Double, for example Policy::MIXED_BF16"
    )]
    Dtype {
        /// The field of the policy: param, compute or output.
        field: &'static str,
        /// The dtype.
        kind: Kind,
    },

    /// Autocast cannot compute in the policy's compute dtype over parameters of its parameter dtype.
    #[error(
        "a module with {param:?} parameters cannot compute in {compute:?}: autocast computes in Half or BFloat16 only, over Float, Half or BFloat16 parameters; use one dtype for both, for example `params=float32,compute=float32`, and cast the variables to it with cast_variables"
    )]
    Module {
        /// The dtype of the parameters.
        param: Kind,
        /// The dtype of the computation.
        compute: Kind,
    },

    /// Two trees of tensors that must have the same structure, shapes and dtypes differ.
    #[error("the trees differ at `root{place}`: {problem}")]
    TreeMismatch {
        /// The path from the root, such as `.0["weight"][2]`; empty for the root itself.
        place: String,
        /// The values of the first and the second tree there.
        problem: String,
    },
}

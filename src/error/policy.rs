//! Errors of precision policies and trees of tensors.

use tch::Kind;

/// Why a precision policy was refused, or does not fit what it was applied to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// There is no such level of mixed precision.
    #[error("there is no level `{text}`: write O0, O1, O2 or O3")]
    LevelText {
        /// The text.
        text: String,
    },

    /// The text of a policy that cannot be read.
    #[error(
        "cannot read the policy `{text}`: {problem}; write for example `params=float32,compute=bfloat16,output=float32`, `p=f32,c=f16`, `bf16`, `half` or `O1`"
    )]
    Text {
        /// The text.
        text: String,
        /// What is wrong with it, and what is allowed.
        problem: String,
    },

    /// A policy casts floating tensors to floating kinds only.
    #[error(
        "the {field} kind of a policy cannot be {kind:?}: use Kind::Float, Kind::Half, Kind::BFloat16 or Kind::Double, for example Policy::MIXED_BF16"
    )]
    Dtype {
        /// The field of the policy: param, compute or output.
        field: &'static str,
        /// The kind that was given.
        kind: Kind,
    },

    /// A module whose parameters have one kind cannot compute in another with autocast.
    #[error(
        "a module with {param:?} parameters cannot compute in {compute:?}: autocast computes in Half or BFloat16 only, over Float, Half or BFloat16; give the policy one kind for both, for example `params=float32,compute=float32`, and cast the variables to it with cast_variables"
    )]
    Module {
        /// The kind of the parameters.
        param: Kind,
        /// The kind to compute in.
        compute: Kind,
    },

    /// Two trees of tensors that must have the same structure, shapes and kinds differ.
    #[error("the trees differ at `root{place}`: {problem}")]
    TreeMismatch {
        /// The way from the root, such as `.0["weight"][2]`; empty for the root.
        place: String,
        /// What stands there in the one and in the other.
        problem: String,
    },
}

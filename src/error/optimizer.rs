//! Errors of optimizers.

use crate::error::BoxError;
use crate::error::text::chain;

/// Why an optimizer was not built, changed, loaded or stepped. Unless a variant says otherwise, nothing was changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OptimizerError {
    /// A list of parameters is empty.
    #[error(
        "the optimizer got an empty list of parameters; a VarStore may be empty, its variables are taken up when they come"
    )]
    NoParameters,

    /// Only an optimizer with master weights can do that.
    #[error(
        "the optimizer has no master weights: build it with `master_weights` and other than MasterWeights::None"
    )]
    NoMasterWeights,

    /// A parameter that a fused optimizer cannot take.
    #[error("the parameter {parameter} {problem}")]
    Parameter {
        /// The parameter's name.
        parameter: String,
        /// What is wrong with it, and what to do.
        problem: &'static str,
    },

    /// An optimizer has no such parameter group.
    #[error("there is no parameter group {group}: this optimizer has {groups}, counted from 0")]
    NoSuchGroup {
        /// The number asked for.
        group: usize,
        /// How many groups there are.
        groups: usize,
    },

    /// The algorithm of an optimizer has no such option.
    #[error("{algorithm} has no {option}")]
    NoSuchOption {
        /// The option, under its PyTorch name.
        option: &'static str,
        /// The algorithm.
        algorithm: &'static str,
    },

    /// Options or a state of one algorithm for an optimizer of another.
    #[error(
        "this optimizer is {algorithm} in all its groups, and the options or the state are those of {given}: build that one"
    )]
    OtherAlgorithm {
        /// The optimizer's algorithm.
        algorithm: &'static str,
        /// The one of the options.
        given: &'static str,
    },

    /// An optimizer state that does not fit the optimizer that is to load it.
    #[error("the optimizer state does not fit: {parameter}: {problem}")]
    State {
        /// The parameter's name.
        parameter: String,
        /// What is missing, too much or of another shape.
        problem: String,
    },

    /// The optimizer's own step failed. It may have changed some of its parameters. The message holds the causes, which
    /// `source()` does not return again.
    #[error("the optimizer's step failed: {}", chain(&**.0))]
    Step(BoxError),
}

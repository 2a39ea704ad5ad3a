//! Errors of optimizers.

use crate::error::text::chain;
use crate::error::{BoxError, sentence, shown};

/// Why an optimizer was not built, changed, loaded or stepped. Unless a variant says otherwise, nothing was changed.
///
/// # Examples
///
/// ```
/// use tch::Tensor;
/// use tch_amp::Error;
/// use tch_amp::optim::{Adagrad, OptimizerError};
///
/// let w = Tensor::from_slice(&[1f32]).set_requires_grad(true);
/// let mut opt = Adagrad::default().build(&[w], 1e-2)?;
/// let set = opt.set_momentum(0.9);
/// assert!(matches!(set, Err(Error::Optimizer(OptimizerError::NoSuchOption { option: "momentum", .. }))));
/// # Ok::<(), Error>(())
/// ```
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum OptimizerError {
    /// A list of parameters is empty.
    #[error(
        "the list of parameters is empty; only a VarStore may be empty, since the optimizer takes variables that are added to it later"
    )]
    NoParameters,

    /// The call needs an optimizer with master weights.
    #[error(
        "the optimizer has no master weights: build it with `master_weights` and a mode other than MasterWeights::None"
    )]
    NoMasterWeights,

    /// A fused optimizer cannot take a parameter.
    #[error("the parameter {parameter} {problem}")]
    Parameter {
        /// The parameter's name.
        parameter: String,
        /// The problem.
        problem: ParameterProblem,
    },

    /// Two parameters of a fused optimizer are views of the same memory, which a step would change twice.
    #[error(
        "the parameters {parameter} and {other} share memory, which a step would change twice: give the optimizer the tensor that both are views of, or copy one of them"
    )]
    SharedMemory {
        /// The name of one parameter.
        parameter: String,
        /// The name of the other one.
        other: String,
    },

    /// The optimizer has no parameter group with this number.
    #[error("there is no parameter group {group}: this optimizer has {groups}, counted from 0")]
    NoSuchGroup {
        /// The requested group.
        group: usize,
        /// The number of groups.
        groups: usize,
    },

    /// The algorithm of the optimizer does not have this option.
    #[error("{algorithm} has no {option}")]
    NoSuchOption {
        /// The option, under its PyTorch name.
        option: &'static str,
        /// The algorithm.
        algorithm: &'static str,
    },

    /// The options or the state are for another algorithm than the optimizer's.
    #[error(
        "this optimizer computes {algorithm}, but the options or the state are for {given}: build a {given} optimizer for them"
    )]
    OtherAlgorithm {
        /// The optimizer's algorithm.
        algorithm: &'static str,
        /// The algorithm of the options or the state.
        given: &'static str,
    },

    /// An optimizer state does not fit the optimizer that loads it.
    #[error("the optimizer state does not fit: {}: {}", shown(parameter), sentence(problem))]
    State {
        /// The parameter's name.
        parameter: String,
        /// The entry that is missing, unexpected or of a wrong shape.
        problem: String,
    },

    /// The optimizer's own step failed. It may have changed some of its parameters. The message includes the causes, so
    /// `source()` returns none.
    #[error("the optimizer's step failed: {}", chain(&**.0))]
    Step(BoxError),
}

/// The problem with a parameter, in an [`OptimizerError::Parameter`]. Its text says what to do where something helps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParameterProblem {
    /// The tensor is not a floating-point one.
    #[error("is not a floating-point tensor, and only those can be optimized")]
    NotFloatingPoint,

    /// The tensor is not a leaf, so that backward leaves it without a gradient.
    #[error(
        "is not a leaf: it was computed from a tensor that requires a gradient, and backward leaves the gradient there; build the model from `tensor.detach().set_requires_grad(true)`, and convert or move a tensor before `set_requires_grad(true)`, not after it"
    )]
    NotALeaf,

    /// The parameter is in the optimizer already.
    #[error("is in the optimizer twice; a parameter belongs to one group")]
    Twice,

    /// Another parameter has the name, by which the state is saved.
    #[error("has the name of another one; names must differ, because a state is saved by names")]
    NameTaken,

    /// The number of the parameter's group is too large.
    #[error("is in a group whose number is more than 65535")]
    GroupTooLarge,

    /// The parameter's dtype does not allow low-bit moments with these master weights, or its device does not.
    #[error(
        "cannot have low-bit moments: they are for f32 parameters, and for bf16 and fp16 ones with MasterWeights::Float or MasterWeights::Remainder, and not for MPS; choose such master weights, make the parameter f32, or use MomentDtype::F32"
    )]
    NoLowBitMoments,

    /// The parameter was cast after its master weight was made.
    #[error(
        "has another dtype than when its master weight was made; build the optimizer after the model has its dtype and load the old `state_dict`, or cast the model back"
    )]
    Cast,
}

//! The errors of autocast regions.

use tch::{Device, Kind};

/// The errors of opening an autocast region.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum AutocastError {
    /// Autocast does not support the dtype.
    #[error(
        "autocast on {device:?} cannot run in {dtype:?}; use Kind::BFloat16 or Kind::Half, or switch the region off with `enabled(false)`"
    )]
    Dtype {
        /// The device of the region.
        device: Device,
        /// The requested dtype.
        dtype: Kind,
    },

    /// The operator is unknown to libtorch.
    #[error(
        "libtorch has no operator {operator}; use its name in libtorch without its overload, such as `softmax`, or with the namespace of an extension, such as `extension::scan`"
    )]
    UnknownOperator {
        /// The operator, with its namespace.
        operator: String,
    },

    /// The inputs of the operator cannot be cast, because it writes to them, returns views of them, or takes no
    /// tensors.
    #[error(
        "autocast cannot cast the inputs of {operator}, because it writes to them, returns views of them or takes no tensors; choose the operators that compute what it is given or what it returns"
    )]
    NotOverridable {
        /// The operator, with its namespace.
        operator: String,
    },

    /// The operator cannot be composed of others.
    #[error(
        "{operator} cannot be composed of other operators; RunAs::Composed is for scaled_dot_product_attention alone"
    )]
    NotComposable {
        /// The operator, with its namespace.
        operator: String,
    },

    /// A rule of a plan holds for no size.
    #[error(
        "the rule for {operator} holds for no size, because it begins at {at_least} and ends below {below}; let `below` be larger than `at_least`, or leave it out"
    )]
    EmptyRange {
        /// The operator.
        operator: String,
        /// The smallest size to which the rule would apply.
        at_least: u64,
        /// The size from which on it would no longer apply.
        below: u64,
    },

    /// The plan was made for another device, libtorch or number of threads.
    #[error(
        "the plan holds on {plan}, and this is {here}; make one here, or set its `platform` if you know that it serves; if it is restored from a checkpoint, leave the precision out of what is restored"
    )]
    PlanElsewhere {
        /// Where the plan holds.
        plan: String,
        /// The platform of the region.
        here: String,
    },

    /// The thread is ending, and its stack of regions has been destroyed.
    #[error(
        "the thread is ending: open autocast regions before its thread-local values are destroyed"
    )]
    ThreadEnding,
}

//! What can go wrong, and what to do about it.
//!
//! Each subject has an error of its own, which its module re-exports. They stand together, below every module that
//! returns them.

mod autocast;
mod checkpoint;
mod function;
mod gradient;
mod optimizer;
mod policy;

mod scaler;
mod text;

use tch::Device;

pub use autocast::AutocastError;
pub use checkpoint::CheckpointError;
pub(crate) use checkpoint::unsaveable;
pub use function::FunctionError;
pub use gradient::GradientError;
pub use optimizer::OptimizerError;
pub use policy::PolicyError;
pub use scaler::ScalerError;
pub(crate) use text::{Number, chain, text, without_backtrace};

/// The result of every fallible call of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Any error, of the user's own code for instance.
pub(crate) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Why a call was refused: an error of the call's subject, or one that any call can return. Unless a variant says
/// otherwise, nothing was changed; [`Error::Torch`] may come midway.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An autocast region was not opened.
    #[error(transparent)]
    Autocast(#[from] AutocastError),

    /// Gradients were refused.
    #[error(transparent)]
    Gradient(#[from] GradientError),

    /// A gradient scaler or a loss scale refused a call.
    #[error(transparent)]
    Scaler(#[from] ScalerError),

    /// An optimizer was not built, changed, loaded or stepped.
    #[error(transparent)]
    Optimizer(#[from] OptimizerError),

    /// A custom autograd function was not applied, or did not pass its check.
    #[error(transparent)]
    Function(#[from] FunctionError),

    /// A precision policy was refused, or does not fit.
    #[error(transparent)]
    Policy(#[from] PolicyError),

    /// A checkpoint was not saved, loaded or restored.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),

    /// The device cannot run autocast or hold a scaler here.
    #[error("{device:?} cannot be used: {reason}")]
    DeviceUnavailable {
        /// The device asked for.
        device: Device,
        /// Why, and what to do.
        reason: String,
    },

    /// An argument, a field of a configuration or a value in a loaded state is not one of those allowed.
    #[error("{name} {problem}")]
    InvalidArgument {
        /// The argument, under its PyTorch name where it has one.
        name: &'static str,
        /// What is wrong with it, and what is allowed.
        problem: String,
    },

    /// libtorch refused, in its own words, or answered what this crate does not know.
    #[error("libtorch: {0}")]
    Torch(String),
}

impl Error {
    /// An argument that is a number outside its range.
    pub(crate) fn out_of_range(name: &'static str, value: f64, rule: &'static str) -> Self {
        Self::InvalidArgument { name, problem: format!("is {}, but must be {rule}", Number(value)) }
    }
}

/// Refuses a value that is outside of its range.
pub(crate) fn ensure(
    name: &'static str,
    value: f64,
    holds: bool,
    rule: &'static str,
) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::out_of_range(name, value, rule)) }
}

impl From<tch::TchError> for Error {
    fn from(error: tch::TchError) -> Self {
        Self::Torch(text(&error))
    }
}

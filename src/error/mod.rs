//! The errors of this crate.
//!
//! Each domain has an error type of its own, which its module re-exports. The types are defined here together because
//! the modules that return them are layered above this one.

mod autocast;
mod checkpoint;
#[cfg(feature = "distributed")]
mod distributed;
mod function;
mod gradient;
mod optimizer;
mod policy;
mod scaler;
mod text;

use std::fmt;

use tch::{Device, Tensor};

pub use autocast::AutocastError;
pub use checkpoint::CheckpointError;
pub(crate) use checkpoint::unsaveable;
#[cfg(feature = "distributed")]
pub use distributed::{DistributedError, VariableChange};
pub use function::FunctionError;
pub use gradient::{GradientChange, GradientError, GradientProblem};
pub use optimizer::{OptimizerError, ParameterProblem};
pub use policy::PolicyError;
pub use scaler::ScalerError;
pub(crate) use text::{
    Number, chain, list, nearest, strict, text, warn, with_nearest, without_backtrace,
};
pub(crate) use torch_files::text::{sentence, shown};

/// The result type of every fallible function of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Any error, such as one returned by the user's code.
pub(crate) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The error of every fallible function of this crate: an error of one domain, or one that any function can return. A
/// call that fails has changed nothing, unless its documentation or that of the variant says otherwise.
/// [`Error::Torch`] is the exception: libtorch may fail midway through a call.
///
/// # Examples
///
/// ```
/// use tch::Device;
/// use tch_amp::{Error, GradScaler};
///
/// let scaler = match GradScaler::new(Device::Cuda(1000)) {
///     Err(Error::DeviceUnavailable { reason, .. }) => {
///         eprintln!("{reason}; training on the CPU");
///         GradScaler::new(Device::Cpu)?
///     }
///     scaler => scaler?,
/// };
/// assert!(scaler.is_enabled());
/// # Ok::<(), Error>(())
/// ```
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An autocast region could not be opened.
    #[error(transparent)]
    Autocast(#[from] AutocastError),

    /// Gradients were refused.
    #[error(transparent)]
    Gradient(#[from] GradientError),

    /// A call to a gradient scaler or a loss scale was refused.
    #[error(transparent)]
    Scaler(#[from] ScalerError),

    /// An optimizer could not be built, changed, loaded or stepped.
    #[error(transparent)]
    Optimizer(#[from] OptimizerError),

    /// A custom autograd function could not be applied, or failed its gradient check, or a call of
    /// [`grad`](crate::function::grad()) was refused.
    #[error(transparent)]
    Function(#[from] FunctionError),

    /// A precision policy is invalid, or does not fit the model.
    #[error(transparent)]
    Policy(#[from] PolicyError),

    /// A checkpoint could not be saved, loaded or restored.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),

    /// A file that is no checkpoint, such as a page of reports, could not be written.
    #[error(transparent)]
    Save(torch_files::Error),

    /// Ranks could not form a group, or could not communicate.
    #[cfg(feature = "distributed")]
    #[error(transparent)]
    Distributed(#[from] DistributedError),

    /// The device is not available in this process, or libtorch has no autocast for it.
    #[error("{device:?} cannot be used: {reason}")]
    DeviceUnavailable {
        /// The requested device.
        device: Device,
        /// Why, and what to do.
        reason: String,
    },

    /// An argument, a field of a configuration or a value in a loaded state is out of range or otherwise not allowed.
    #[error("{name} {problem}")]
    InvalidArgument {
        /// The argument, by its name in PyTorch where it has one.
        name: &'static str,
        /// The problem, and the values that are allowed.
        problem: String,
    },

    /// Something that a graph cannot hold was called in an iteration of a graph, or the outcome of a captured step was
    /// used outside of its iteration.
    #[error("a captured iteration does not allow {call}: {remedy}")]
    Capture {
        /// The call.
        call: &'static str,
        /// The remedy.
        remedy: String,
    },

    /// Something has changed since an iteration was captured that its replays would not follow. Nothing was replayed.
    #[error(
        "since the iteration was captured something has changed that a replay would not follow: {what}; call \
         `recapture` on the graph, and replay again"
    )]
    ChangedSinceCapture {
        /// The thing that has changed.
        what: &'static str,
    },

    /// Something else runs the backward passes of this process, such as Python's torch, and decides alone how autograd
    /// keeps what it saves.
    #[error(
        "the backward passes of this process are run by {engine} instead of libtorch's own engine, so what autograd saves \
         cannot be kept in another form. In a process of Python use `torch.autograd.graph.saved_tensors_hooks`"
    )]
    OtherEngine {
        /// The type of the engine in C++.
        engine: String,
    },

    /// libtorch failed, with its own message, or returned something that this crate does not recognize.
    #[error("libtorch: {0}")]
    Torch(String),
}

/// Implements `Debug` as the message. A program whose `main` returns the error prints it so, and a field may hold
/// megabytes of text from a file.
macro_rules! debug_is_the_message {
    ($($error:ty),+ $(,)?) => {$(
        impl fmt::Debug for $error {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{self}")
            }
        }
    )+};
}

debug_is_the_message!(
    Error,
    AutocastError,
    CheckpointError,
    FunctionError,
    GradientError,
    OptimizerError,
    PolicyError,
    ScalerError,
);

#[cfg(feature = "distributed")]
debug_is_the_message!(DistributedError);

/// The messages of libtorch's allocators, on the host and on GPUs, and of C++'s own.
const OUT_OF_MEMORY: [&str; 4] =
    ["out of memory", "can't allocate memory", "not enough memory", "std::bad_alloc"];

impl Error {
    /// Returns whether memory ran out, on a GPU or on the host, so that a smaller batch may succeed. Corresponds to
    /// catching `torch.OutOfMemoryError`.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Kind, Tensor};
    /// use tch_amp::Error;
    ///
    /// let huge = Tensor::f_zeros([1 << 50], (Kind::Float, Device::Cpu)).map_err(Error::from);
    /// assert!(huge.unwrap_err().is_out_of_memory());
    /// ```
    pub fn is_out_of_memory(&self) -> bool {
        // The others say what an optimizer of tch or a function of the program said.
        let message = match self {
            Self::Torch(message) => message.clone(),
            Self::Function(FunctionError::Forward { .. })
            | Self::Optimizer(OptimizerError::Step(_)) => self.to_string(),
            _ => return false,
        };
        OUT_OF_MEMORY.iter().any(|text| message.contains(text))
    }

    /// Makes an [`Error::InvalidArgument`] for a number outside its range.
    pub(crate) fn out_of_range(name: &'static str, value: f64, rule: &'static str) -> Self {
        Self::InvalidArgument { name, problem: format!("is {}, but must be {rule}", Number(value)) }
    }
}

/// Returns an error for `value` unless `holds`.
pub(crate) fn ensure(
    name: &'static str,
    value: f64,
    holds: bool,
    rule: &'static str,
) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::out_of_range(name, value, rule)) }
}

/// Returns an error for an undefined tensor, of which libtorch says only that its dtype is unknown.
pub(crate) fn ensure_defined(name: &'static str, tensor: &Tensor) -> Result<()> {
    if tensor.defined() {
        return Ok(());
    }
    let problem = "is an undefined tensor, such as `Tensor::new()` or the gradient of an unused parameter; pass one that \
                   an operator has returned";
    Err(Error::InvalidArgument { name, problem: problem.to_owned() })
}

impl From<tch::TchError> for Error {
    fn from(error: tch::TchError) -> Self {
        Self::Torch(text(&error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lack_of_memory_is_found_wherever_libtorch_reports_it() {
        let cause = || -> BoxError { "CUDA out of memory. Tried to allocate 2 GiB".into() };
        let forward = FunctionError::Forward { name: "block".to_owned(), cause: cause() };
        for error in [
            Error::Torch("std::bad_alloc".to_owned()),
            Error::from(forward),
            Error::from(OptimizerError::Step(cause())),
        ] {
            assert!(error.is_out_of_memory(), "{error}");
        }
        let other = Error::from(OptimizerError::Step("a shape is wrong".into()));
        assert!(!other.is_out_of_memory());
    }
}

//! Clipping gradients.

use tch::{Device, Kind, Tensor};

use crate::capture;
#[cfg(doc)]
use crate::error::GradientError;
use crate::error::{Error, GradientProblem, Result, ensure};
use crate::ffi::{self, Gradient};
use crate::gradients::{Gradients, uncountable};

/// The limit to which the common norm of gradients is clipped. A number is the limit of the 2-norm. The counterpart of
/// the arguments of `torch.nn.utils.clip_grad_norm_`.
///
/// # Examples
///
/// ```
/// # use tch::Tensor;
/// use tch_amp::gradients::{ClipNorm, clip_grad_norm};
///
/// # let w = Tensor::from_slice(&[0f32, 0.0]).set_requires_grad(true);
/// # (&w * Tensor::from_slice(&[3f32, 4.0])).sum(None).backward();
/// # let parameters = [w];
/// let largest = ClipNorm { norm_type: f64::INFINITY, ..ClipNorm::from(8.0) };
/// assert_eq!(clip_grad_norm(&parameters, largest)?.double_value(&[]), 4.0);
/// assert_eq!(clip_grad_norm(&parameters, 8.0)?.double_value(&[]), 5.0);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClipNorm {
    /// The largest norm that gradients may keep; at least 0. Infinity leaves them unchanged, and their norm is
    /// returned.
    pub max_norm: f64,
    /// The type p of the norm, which is the p-th root of the sum of the p-th powers of all absolute values; more
    /// than 0. Infinity stands for the largest absolute value. 2 in the conversion from a number.
    pub norm_type: f64,
    /// Whether a norm that is infinite or NaN is an error. The host then synchronizes to learn the norm. `false` in the
    /// conversion from a number.
    pub error_if_nonfinite: bool,
}

impl From<f64> for ClipNorm {
    fn from(max_norm: f64) -> Self {
        Self { max_norm, norm_type: 2.0, error_if_nonfinite: false }
    }
}

impl ClipNorm {
    /// Refuses limits and types that make no sense.
    pub(crate) fn checked(self) -> Result<Self> {
        check_limit("max_norm", self.max_norm)?;
        ensure("norm_type", self.norm_type, self.norm_type > 0.0, "more than 0")?;
        Ok(self)
    }

    /// Checks the options of a scaler's step, which is skipped where the norm is not finite.
    pub(crate) fn checked_for_step(self) -> Result<Self> {
        if self.error_if_nonfinite {
            let problem = "cannot be set for a step, which a scaler skips if the norm is not finite; \
                           clip with `Unscaled::clip_grad_norm`";
            return Err(Error::InvalidArgument {
                name: "error_if_nonfinite",
                problem: problem.to_owned(),
            });
        }
        self.checked()
    }
}

/// Scales the gradients of some parameters down in place so that their common norm is at most `clip`, such as a number
/// for the 2-norm, and returns the norm before clipping. The counterpart of `torch.nn.utils.clip_grad_norm_`.
///
/// The gradients are multiplied by min(1, max_norm / (norm + 1e-6)). The norm is a 0-dim tensor on the device of the
/// first gradient, or zero if there are no gradients. Its dtype is f64 if all gradients are f64, or if it is on the CPU
/// and too large for f32; otherwise f32. If it is not finite, the gradients become zero or NaN, as in PyTorch, unless
/// [`error_if_nonfinite`](ClipNorm::error_if_nonfinite) is set.
///
/// On the CPU the terms of the norm are added up in f64, so its last bit may be more accurate than PyTorch's.
/// Synchronizes only where gradients on a GPU and on the CPU are clipped together, and with `error_if_nonfinite`.
///
/// # Errors
///
/// [`Error::InvalidArgument`] for a negative or NaN limit and for a type of norm that is not more than 0;
/// [`GradientError::Unsupported`] for a gradient that is sparse, or of another dtype than fp16, bf16, f32, f64 and
/// complex ones, such as Float8; [`GradientError::NonFiniteNorm`] for a norm that is not finite, if that is an error.
/// The gradients are unchanged then.
///
/// # Examples
///
/// ```
/// # use tch::{Device, Kind, Tensor};
/// let w = Tensor::zeros([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// (&w * Tensor::from_slice(&[3f32, 4.0])).sum(Kind::Float).backward();
/// let norm = tch_amp::gradients::clip_grad_norm(&[w.shallow_clone()], 1.0)?;
/// assert_eq!(norm.double_value(&[]), 5.0);
/// # Ok::<(), tch_amp::Error>(())
/// ```
pub fn clip_grad_norm(parameters: &[Tensor], clip: impl Into<ClipNorm>) -> Result<Tensor> {
    let norm = reduce_norm(parameters, clip.into().checked()?)?;
    norm.map_or_else(|| Ok(Tensor::f_zeros([], (Kind::Float, Device::Cpu))?), Ok)
}

/// Clamps every element of the gradients of some parameters to `-max..=max`, in place. The counterpart of
/// `torch.nn.utils.clip_grad_value_`.
///
/// # Errors
///
/// [`Error::InvalidArgument`] for a negative or NaN limit; [`GradientError::Unsupported`] for a gradient that is
/// sparse, or of another dtype than fp16, bf16, f32 and f64, such as Float8 and complex ones. Nothing is changed then.
///
/// # Examples
///
/// ```
/// use tch::Tensor;
/// use tch_amp::gradients::clip_grad_value;
///
/// let w = Tensor::from_slice(&[0f32, 0.0]).set_requires_grad(true);
/// (&w * Tensor::from_slice(&[3f32, -0.5])).sum(None).backward();
/// clip_grad_value(&[w.shallow_clone()], 1.0)?;
/// assert_eq!(Vec::<f64>::try_from(w.grad())?, [1.0, -0.5]);
/// # Ok::<(), tch_amp::Error>(())
/// ```
pub fn clip_grad_value(parameters: &[Tensor], max: f64) -> Result<()> {
    check_limit("max", max)?;
    clamp(parameters, max)
}

/// Clips to a checked limit, and returns the norm, if there are gradients. An error names the parameter.
pub(crate) fn reduce_norm(parameters: &[Tensor], clip: ClipNorm) -> Result<Option<Tensor>> {
    let ClipNorm { max_norm, norm_type, error_if_nonfinite } = clip;
    if error_if_nonfinite {
        capture::refuse("`error_if_nonfinite`", "leave it out; the scaler skips such steps")?;
    }
    let norm = ffi::clip_grad_norm(parameters, max_norm, norm_type, error_if_nonfinite);
    norm.map_err(|error| explained(parameters, unclippable, error))
}

/// Clamps to a checked limit. An error names the parameter.
pub(crate) fn clamp(parameters: &[Tensor], max: f64) -> Result<()> {
    let clamped = ffi::clip_grad_value(parameters, max);
    clamped.map_err(|error| explained(parameters, unclampable, error))
}

/// The reason why a gradient cannot be clamped, if there is one.
pub(crate) fn unclampable(gradient: &Gradient) -> Option<GradientProblem> {
    let complex = || gradient.is_complex().then_some(GradientProblem::Complex);
    unclippable(gradient).or_else(complex)
}

/// The reason why a gradient can be neither normed nor clipped, if there is one.
pub(crate) fn unclippable(gradient: &Gradient) -> Option<GradientProblem> {
    uncountable(gradient).or_else(|| gradient.is_sparse().then_some(GradientProblem::Sparse))
}

/// Replaces an error by one that names the parameter, if a gradient with a problem is the cause.
fn explained(
    parameters: &[Tensor],
    problem: fn(&Gradient) -> Option<GradientProblem>,
    error: Error,
) -> Error {
    match Gradients::of(parameters.into(), Box::new(|_, _| None)) {
        Ok(gradients) => gradients.refuse(Gradient::exists, problem).err().unwrap_or(error),
        Err(_) => error,
    }
}

pub(crate) fn check_limit(field: &'static str, value: f64) -> Result<()> {
    ensure(field, value, value >= 0.0, "at least 0")
}

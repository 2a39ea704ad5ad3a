//! Clipping gradients.

use tch::{Device, Kind, Tensor};

#[cfg(doc)]
use crate::error::GradientError;
use crate::error::{Error, Result};
use crate::ffi::{self, Gradient};
use crate::gradients::Gradients;

/// Scales the gradients of some parameters down in place so that their common 2-norm is at most `max_norm`, and returns
/// the norm before clipping. The counterpart of `torch.nn.utils.clip_grad_norm_`.
///
/// The gradients are multiplied by min(1, max_norm / (norm + 1e-6)). The norm is a 0-dim tensor on the device of the
/// first gradient, or zero if there are no gradients. Its dtype is f64 if all gradients are f64, or if it is on the CPU
/// and too large for f32; otherwise f32. If it is not finite, the gradients become zero or NaN, as in PyTorch.
///
/// On the CPU the squares are added up in f64, so the last bit of the norm may be more accurate than PyTorch's.
/// Synchronizes only where gradients on a GPU and on the CPU are clipped together.
///
/// # Errors
///
/// [`Error::InvalidArgument`] for a negative or NaN limit; [`GradientError::Unsupported`] for a gradient that is
/// sparse, or of another dtype than fp16, bf16, f32, f64 and complex ones, such as Float8.
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
pub fn clip_grad_norm(parameters: &[Tensor], max_norm: f64) -> Result<Tensor> {
    clip(parameters, max_norm, false)
}

/// Clips like [`clip_grad_norm`], but fails if the norm is infinite or NaN. Synchronizes to find out. Corresponds to
/// `torch.nn.utils.clip_grad_norm_` with `error_if_nonfinite=True`.
///
/// # Errors
///
/// [`GradientError::NonFiniteNorm`], which leaves the gradients unchanged; otherwise the same as [`clip_grad_norm`].
pub fn clip_grad_norm_error_if_nonfinite(parameters: &[Tensor], max_norm: f64) -> Result<Tensor> {
    clip(parameters, max_norm, true)
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

fn clip(parameters: &[Tensor], max_norm: f64, error_if_nonfinite: bool) -> Result<Tensor> {
    check_limit("max_norm", max_norm)?;
    let norm = reduce_norm(parameters, max_norm, error_if_nonfinite)?;
    norm.map_or_else(|| Ok(Tensor::f_zeros([], (Kind::Float, Device::Cpu))?), Ok)
}

/// Clips to a checked limit, and returns the norm, if there are gradients. An error names the parameter.
pub(crate) fn reduce_norm(
    parameters: &[Tensor],
    max_norm: f64,
    error_if_nonfinite: bool,
) -> Result<Option<Tensor>> {
    let norm = ffi::clip_grad_norm(parameters, max_norm, error_if_nonfinite);
    norm.map_err(|error| explained(parameters, unclippable, error))
}

/// Clamps to a checked limit. An error names the parameter.
pub(crate) fn clamp(parameters: &[Tensor], max: f64) -> Result<()> {
    let clamped = ffi::clip_grad_value(parameters, max);
    clamped.map_err(|error| explained(parameters, unclampable, error))
}

/// The reason why a gradient cannot be clamped, if there is one.
pub(crate) fn unclampable(gradient: &Gradient) -> Option<&'static str> {
    let complex =
        "is complex, and cannot be clamped, because complex numbers have no order; clip the norm";
    unclippable(gradient).or_else(|| gradient.is_complex().then_some(complex))
}

/// The reason why a gradient can be neither normed nor clipped, if there is one.
pub(crate) fn unclippable(gradient: &Gradient) -> Option<&'static str> {
    if !gradient.is_strided() {
        return Some(
            "is sparse, and sparse gradients can be neither normed nor clipped; make it dense with `to_dense` first",
        );
    }
    (!gradient.is_floating_or_complex()).then_some(
        "is neither fp16, bf16, f32, f64 nor complex, and can be neither normed nor clipped; convert it first",
    )
}

/// Replaces an error by one that names the parameter, if a gradient with a problem is the cause.
fn explained(
    parameters: &[Tensor],
    problem: fn(&Gradient) -> Option<&'static str>,
    error: Error,
) -> Error {
    match Gradients::of(parameters.into(), Box::new(|_, _| None)) {
        Ok(gradients) => gradients.refuse(Gradient::exists, problem).err().unwrap_or(error),
        Err(_) => error,
    }
}

pub(crate) fn check_limit(field: &'static str, value: f64) -> Result<()> {
    if value >= 0.0 {
        return Ok(());
    }
    let rule = "at least 0";
    Err(Error::out_of_range(field, value, rule))
}

//! Gradient clipping.

use tch::Tensor;

use super::{OutsideRegions, call, given, pointers};
use crate::error::{Error, GradientError, Result};
use crate::sys;

/// Clips the gradients of the parameters to a total norm, and returns the norm from before; `None` if there are no
/// gradients. Synchronizes only with `error_if_nonfinite`, and then returns an error for a non-finite norm, before
/// anything is clipped.
pub(crate) fn clip_grad_norm(
    parameters: &[Tensor],
    max_norm: f64,
    norm_type: f64,
    error_if_nonfinite: bool,
) -> Result<Option<Tensor>> {
    let _own = OutsideRegions::enter();
    let tensors = pointers(parameters);
    let (array, count) = (tensors.as_ptr(), tensors.len());
    let mut finite = 1;
    // SAFETY: the array has `count` elements, `parameters` keeps the tensors alive, and `finite` is valid for a write.
    let norm = call(|err| unsafe {
        let check = error_if_nonfinite.into();
        sys::tamp_clip_grad_norm(array, count, max_norm, norm_type, check, &mut finite, err)
    })?;
    if norm.is_null() {
        return Ok(None);
    }
    let norm = given(norm)?;
    match finite {
        0 => Err(Error::Gradient(GradientError::NonFiniteNorm { norm: norm.f_double_value(&[])? })),
        _ => Ok(Some(norm)),
    }
}

/// Returns the norm of norms of one type, at least one, on the device of the first.
pub(crate) fn norms_join(norms: &[Tensor], norm_type: f64) -> Result<Tensor> {
    let tensors = pointers(norms);
    let (array, count) = (tensors.as_ptr(), tensors.len());
    // SAFETY: the array has `count` elements, and `norms` keeps the tensors alive.
    given(call(|err| unsafe { sys::tamp_norms_join(array, count, norm_type, err) })?)
}

/// Computes the factor by which gradients with this norm are to be multiplied, on the device of `norm`.
pub(crate) fn clip_factor(norm: &Tensor, max_norm: f64) -> Result<Tensor> {
    // SAFETY: `norm` is a live tensor, and `err` is valid for a write.
    given(call(|err| unsafe { sys::tamp_clip_factor(norm.as_ptr(), max_norm, err) })?)
}

/// Clips the gradients of distinct parameters, whose total norm is `norm` and of which none shares memory.
pub(crate) fn clip_by_norm<'a>(
    parameters: impl IntoIterator<Item = &'a Tensor>,
    norm: &Tensor,
    max_norm: f64,
) -> Result<()> {
    let tensors = pointers(parameters);
    let (array, count, norm) = (tensors.as_ptr(), tensors.len(), norm.as_ptr());
    // SAFETY: the array has `count` elements, and the borrows keep the tensors and the norm alive.
    call(|err| unsafe { sys::tamp_clip_by_norm(array, count, norm, max_norm, err) })
}

/// Clamps every element of the parameters' gradients to `-max..=max`.
pub(crate) fn clip_grad_value(parameters: &[Tensor], max: f64) -> Result<()> {
    let tensors = pointers(parameters);
    // SAFETY: the array has `tensors.len()` elements, and `parameters` keeps the tensors alive.
    call(|err| unsafe { sys::tamp_clip_grad_value(tensors.as_ptr(), tensors.len(), max, err) })
}

//! Gradients and scales.

use std::ptr;

use tch::Tensor;

use super::{call, given, pointer, pointers};
use crate::error::{Error, Result};
use crate::sys;

/// Describes the gradients of the parameters, in their order.
pub(crate) fn gradients_inspect(parameters: &[Tensor]) -> Result<Vec<sys::Gradient>> {
    let tensors = pointers(parameters);
    let mut gradients = vec![sys::Gradient::default(); tensors.len()];
    let out = gradients.as_mut_ptr();
    // SAFETY: both arrays have `tensors.len()` elements, and `parameters` keeps the tensors alive.
    call(|err| unsafe { sys::tamp_gradients_inspect(tensors.as_ptr(), tensors.len(), out, err) })?;
    Ok(gradients)
}

/// What tells tensors apart: the same number for every handle of one tensor, as long as one of them lives.
pub(crate) fn identities(tensors: &[Tensor]) -> Result<Vec<usize>> {
    let known = gradients_inspect(tensors)?;
    Ok(known.iter().map(|gradient| gradient.parameter).collect())
}

/// Drops the gradient of a parameter.
pub(crate) fn gradient_drop(parameter: &Tensor) -> Result<()> {
    // SAFETY: `parameter` is a live tensor; the shim changes only its gradient slot.
    call(|err| unsafe { sys::tamp_gradient_drop(pointer(parameter), err) })
}

/// Why gradients were not unscaled, and whether some of them may have been.
#[derive(Debug)]
pub(crate) struct Interrupted {
    pub(crate) error: Error,
    pub(crate) begun: bool,
}

/// Unscales the gradients of `parameters`, each of which lies on the device of one of `found_infs`, and tells for each
/// of these whether a gradient there was infinite or NaN; `None` where the answer lies on the device.
pub(crate) fn gradients_unscale<'a>(
    parameters: impl IntoIterator<Item = &'a Tensor>,
    scale: &Tensor,
    found_infs: &[Tensor],
    options: u8,
) -> std::result::Result<Vec<Option<bool>>, Interrupted> {
    let (tensors, flags) = (pointers(parameters), pointers(found_infs));
    let (array, count, scale) = (tensors.as_ptr(), tensors.len(), scale.as_ptr());
    let mut answers = vec![sys::ON_DEVICE; flags.len()];
    let (flags, devices, out) = (flags.as_ptr(), flags.len(), answers.as_mut_ptr());
    let mut begun = 0;
    // SAFETY: the arrays have `count` and `devices` elements, the borrows keep every tensor alive, `begun` is valid for a
    // write, and tensors are changed in place only through libtorch's own handles, which alias freely.
    let done = call(|err| unsafe {
        let begun = &mut begun;
        sys::tamp_gradients_unscale(array, count, scale, flags, out, devices, options, begun, err)
    });
    let known = done.and_then(|()| answers.into_iter().map(known).collect());
    known.map_err(|error| Interrupted { error, begun: begun != 0 })
}

/// An answer of the shim, where the host has it.
fn known(answer: u8) -> Result<Option<bool>> {
    match answer {
        sys::FINITE => Ok(Some(false)),
        sys::NON_FINITE => Ok(Some(true)),
        sys::ON_DEVICE => Ok(None),
        other => Err(Error::Torch(format!("the check of gradients answered {other}"))),
    }
}

/// The norm of the gradients of `parameters`, all of `found_inf`'s device, divided by `scale`, and whether it is
/// infinite or NaN; `None` where the answer lies on the device. The gradients stay as they are.
pub(crate) fn gradients_norm(
    parameters: &[&Tensor],
    scale: &Tensor,
    found_inf: &Tensor,
) -> Result<(Tensor, Option<bool>)> {
    let tensors = pointers(parameters.iter().copied());
    let (array, count) = (tensors.as_ptr(), tensors.len());
    let (scale, found_inf) = (scale.as_ptr(), pointer(found_inf));
    let mut answer = 0;
    // SAFETY: the array has `count` elements, the borrows keep every tensor alive, and `answer` is valid for a write.
    let norm = call(|err| unsafe {
        sys::tamp_gradients_norm(array, count, scale, found_inf, &mut answer, err)
    })?;
    Ok((given(norm)?, known(answer)?))
}

/// Takes the gradients of the parameters away from them; `None` where there is none.
pub(crate) fn gradients_take(parameters: &[Tensor]) -> Result<Vec<Option<Tensor>>> {
    let tensors = pointers(parameters);
    let mut out = vec![ptr::null_mut(); tensors.len()];
    let (array, count, to) = (tensors.as_ptr(), tensors.len(), out.as_mut_ptr());
    // SAFETY: both arrays have `count` elements, `out` is all null, the borrow keeps the parameters alive, and what the
    // shim writes to `out` is ours, after a failure, too.
    let taken = call(|err| unsafe { sys::tamp_gradients_take(array, count, to, err) });
    let owned = |tensor: *mut sys::Tensor| (!tensor.is_null()).then(|| given(tensor)).transpose();
    let gradients: Vec<_> = out.into_iter().map(owned).collect::<Result<_>>()?;
    if let Err(error) = taken {
        // A failure on the way loses none.
        gradients_add(parameters, &gradients)?;
        return Err(error);
    }
    Ok(gradients)
}

/// Runs the backward of a tensor of one element.
pub(crate) fn backward(loss: &Tensor, retain_graph: bool) -> Result<()> {
    // SAFETY: `loss` is a live tensor; gradients are written through libtorch's own handles, which alias freely.
    call(|err| unsafe { sys::tamp_backward(loss.as_ptr(), retain_graph.into(), err) })
}

/// Adds what `gradients_take` has taken to the gradients that there are now.
pub(crate) fn gradients_add(parameters: &[Tensor], taken: &[Option<Tensor>]) -> Result<()> {
    assert_eq!(parameters.len(), taken.len());
    let both = parameters.iter().zip(taken);
    let some = both.filter_map(|(parameter, taken)| Some((parameter, taken.as_ref()?)));
    let (parameters, taken): (Vec<_>, Vec<_>) = some.unzip();
    let (parameters, taken) = (pointers(parameters), pointers(taken));
    let (array, count) = (parameters.as_ptr(), parameters.len());
    // SAFETY: both arrays have `count` elements, and the borrows keep every tensor alive.
    call(|err| unsafe { sys::tamp_gradients_add(array, taken.as_ptr(), count, err) })
}

/// Whether any of the one-element tensors is not zero. Waits for their devices, once.
pub(crate) fn any_nonzero(tensors: &[&Tensor]) -> Result<bool> {
    let tensors = pointers(tensors.iter().copied());
    // SAFETY: the array has `tensors.len()` elements, and the borrows keep the tensors alive.
    call(|err| unsafe { sys::tamp_any_nonzero(tensors.as_ptr(), tensors.len(), err) })
        .map(|any| any != 0)
}

/// Whether all elements of floating or complex tensors are finite: a bool on the device of the first.
pub(crate) fn all_finite(tensors: &[&Tensor]) -> Result<Tensor> {
    let tensors = pointers(tensors.iter().copied());
    // SAFETY: the array has `tensors.len()` elements, and the borrows keep the tensors alive.
    given(call(|err| unsafe { sys::tamp_all_finite(tensors.as_ptr(), tensors.len(), err) })?)
}

/// One flag that is 1 when any of the flags is, on the first GPU that one lies on; of one flag, that itself.
pub(crate) fn flags_join<'a>(flags: impl IntoIterator<Item = &'a Tensor>) -> Result<Tensor> {
    let tensors = pointers(flags);
    // SAFETY: the array has `tensors.len()` elements, and the caller's borrows keep the tensors alive.
    given(call(|err| unsafe { sys::tamp_flags_join(tensors.as_ptr(), tensors.len(), err) })?)
}

/// A scale at the end of an iteration, and what was found in its gradients.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScaleUpdate<'a> {
    pub(crate) scale: &'a Tensor,
    pub(crate) tracker: &'a Tensor,
    pub(crate) patience: Option<&'a Tensor>,
    pub(crate) found_infs: &'a [&'a Tensor],
    pub(crate) rule: sys::ScaleRule,
}

/// Grows or backs off scales and counts in their trackers and patience, in place: all of them or none.
pub(crate) fn scales_update(updates: &[ScaleUpdate<'_>]) -> Result<()> {
    let flags = |update: &ScaleUpdate<'_>| pointers(update.found_infs.iter().copied());
    let flags: Vec<_> = updates.iter().map(flags).collect();
    let raw = updates.iter().zip(&flags).map(|(update, flags)| sys::ScaleUpdate {
        scale: pointer(update.scale),
        tracker: pointer(update.tracker),
        patience: update.patience.map_or(ptr::null_mut(), pointer),
        found_infs: flags.as_ptr(),
        count: flags.len(),
        rule: update.rule,
    });
    let raw: Vec<_> = raw.collect();
    // SAFETY: the array has `raw.len()` elements of the shim's layout, each of which names an array in `flags` and its
    // length; the borrows keep every tensor alive, and `patience` is one of them or null.
    call(|err| unsafe { sys::tamp_scales_update(raw.as_ptr(), raw.len(), err) })
}

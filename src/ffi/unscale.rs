//! Checking and unscaling gradients.

use std::ptr;

use tch::Tensor;

use super::{call, given, pointers};
use crate::error::{Error, Result};
use crate::sys;

/// Why gradients could not be unscaled, and whether some of them may have been.
#[derive(Debug)]
pub(crate) struct Interrupted {
    pub(crate) error: Error,
    pub(crate) begun: bool,
}

/// How gradients are checked and unscaled.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unscaling {
    /// The gradients are only checked and stay as they are.
    pub(crate) check_only: bool,
    /// The unscaled gradients are checked as well: unscaling can overflow if the scale is less than one.
    pub(crate) recheck: bool,
    /// libtorch's generic operations are used even where there is a kernel.
    #[cfg(test)]
    pub(crate) generic: bool,
}

impl Unscaling {
    pub(crate) const fn new(check_only: bool, recheck: bool) -> Self {
        Self {
            check_only,
            recheck,
            #[cfg(test)]
            generic: false,
        }
    }

    fn code(self) -> u8 {
        let code = u8::from(self.check_only) * sys::UNSCALE_CHECK_ONLY
            + u8::from(self.recheck) * sys::UNSCALE_RECHECK;
        #[cfg(test)]
        let code = code + u8::from(self.generic) * sys::UNSCALE_GENERIC;
        code
    }
}

/// Whether gradients on one device were non-finite.
#[derive(Debug)]
pub(crate) struct FoundInf {
    /// 1 if some were non-finite and 0 otherwise, on their device.
    pub(crate) tensor: Tensor,
    /// The same, if the host has it.
    pub(crate) host: Option<bool>,
}

impl FoundInf {
    fn new(tensor: *mut sys::Tensor, answer: u8) -> Result<Self> {
        let tensor = given(tensor)?;
        Ok(Self { tensor, host: known(answer)? })
    }

    pub(crate) fn shallow_clone(&self) -> Self {
        Self { tensor: self.tensor.shallow_clone(), host: self.host }
    }
}

/// Unscales the gradients of `parameters`, which are on `devices` devices, and returns for each device, in the order of
/// their first gradients, whether any gradient was non-finite.
pub(crate) fn gradients_unscale<'a>(
    parameters: impl IntoIterator<Item = &'a Tensor>,
    scale: &Tensor,
    devices: usize,
    unscaling: Unscaling,
) -> std::result::Result<Vec<FoundInf>, Interrupted> {
    let tensors = pointers(parameters);
    let (array, count, scale) = (tensors.as_ptr(), tensors.len(), scale.as_ptr());
    let mut flags = vec![ptr::null_mut(); devices];
    let mut answers = vec![sys::ON_DEVICE; devices];
    let (found, out) = (flags.as_mut_ptr(), answers.as_mut_ptr());
    let (options, mut begun) = (unscaling.code(), 0);
    // SAFETY: the arrays have `count` and `devices` elements, the borrows keep every tensor alive, `begun` is valid for
    // a write, and tensors are changed in place only through libtorch's own handles, which alias freely.
    let done = call(|err| unsafe {
        let begun = &mut begun;
        sys::tamp_gradients_unscale(array, count, scale, found, out, devices, options, begun, err)
    });
    let found = done.and_then(|()| {
        flags.into_iter().zip(answers).map(|(flag, answer)| FoundInf::new(flag, answer)).collect()
    });
    found.map_err(|error| Interrupted { error, begun: begun != 0 })
}

/// Returns a norm of the gradients of `parameters`, which are on one device, divided by the scale that they
/// have, if any, and whether that norm is non-finite, as it is if any gradient is. The gradients stay as they are.
pub(crate) fn gradients_norm<'a>(
    parameters: impl IntoIterator<Item = &'a Tensor>,
    norm_type: f64,
    scale: Option<&Tensor>,
) -> Result<(Tensor, FoundInf)> {
    let tensors = pointers(parameters);
    let (array, count) = (tensors.as_ptr(), tensors.len());
    let scale = scale.map_or(ptr::null(), Tensor::as_ptr);
    let (mut flag, mut answer) = (ptr::null_mut(), sys::ON_DEVICE);
    // SAFETY: the array has `count` elements, the borrows keep every tensor alive, the scale may be null, and `flag`
    // and `answer` are valid for a write.
    let norm = call(|err| unsafe {
        sys::tamp_gradients_norm(array, count, norm_type, scale, &mut flag, &mut answer, err)
    })?;
    Ok((given(norm)?, FoundInf::new(flag, answer)?))
}

/// Decodes an answer of the shim, which is `None` if only the device has it.
fn known(answer: u8) -> Result<Option<bool>> {
    match answer {
        sys::FINITE => Ok(Some(false)),
        sys::NON_FINITE => Ok(Some(true)),
        sys::ON_DEVICE => Ok(None),
        other => Err(Error::Torch(format!("the check of gradients answered {other}"))),
    }
}

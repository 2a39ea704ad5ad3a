//! Looking at gradients, and unscaling them.

use tch::Tensor;

use super::{call, given, pointer, pointers};
use crate::error::{Error, Result};
use crate::sys;

/// Why gradients were not unscaled, and whether some of them may have been.
#[derive(Debug)]
pub(crate) struct Interrupted {
    pub(crate) error: Error,
    pub(crate) begun: bool,
}

/// How gradients are looked at.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unscaling {
    /// They stay as they are.
    pub(crate) check_only: bool,
    /// What became of them is looked at, too: where the scale is less than one, unscaling can overflow.
    pub(crate) recheck: bool,
    /// By libtorch's generic operations even where there is a kernel.
    #[cfg(test)]
    pub(crate) generic: bool,
}

impl Unscaling {
    /// The gradients stay as they are.
    pub(crate) const CHECK_ONLY: Self = Self::new(true, false);

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

/// Unscales the gradients of `parameters`, each of which lies on the device of one of `found_infs`, and tells for each
/// of these whether a gradient there was infinite or NaN; `None` where the answer lies on the device.
pub(crate) fn gradients_unscale<'a>(
    parameters: impl IntoIterator<Item = &'a Tensor>,
    scale: &Tensor,
    found_infs: &[Tensor],
    unscaling: Unscaling,
) -> std::result::Result<Vec<Option<bool>>, Interrupted> {
    let (tensors, flags) = (pointers(parameters), pointers(found_infs));
    let (array, count, scale) = (tensors.as_ptr(), tensors.len(), scale.as_ptr());
    let mut answers = vec![sys::ON_DEVICE; flags.len()];
    let (flags, devices, out) = (flags.as_ptr(), flags.len(), answers.as_mut_ptr());
    let (options, mut begun) = (unscaling.code(), 0);
    // SAFETY: the arrays have `count` and `devices` elements, the borrows keep every tensor alive, `begun` is valid for a
    // write, and tensors are changed in place only through libtorch's own handles, which alias freely.
    let done = call(|err| unsafe {
        let begun = &mut begun;
        sys::tamp_gradients_unscale(array, count, scale, flags, out, devices, options, begun, err)
    });
    let known = done.and_then(|()| answers.into_iter().map(known).collect());
    known.map_err(|error| Interrupted { error, begun: begun != 0 })
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

/// An answer of the shim, where the host has it.
fn known(answer: u8) -> Result<Option<bool>> {
    match answer {
        sys::FINITE => Ok(Some(false)),
        sys::NON_FINITE => Ok(Some(true)),
        sys::ON_DEVICE => Ok(None),
        other => Err(Error::Torch(format!("the check of gradients answered {other}"))),
    }
}

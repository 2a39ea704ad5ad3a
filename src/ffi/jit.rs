//! TorchScript modules.

use tch::Tensor;

use super::{call, given};
use crate::error::Result;
use crate::sys;

/// Turns TorchScript's own autocast pass on or off, in all threads, and returns whether it was on.
pub(crate) fn jit_set_autocast_mode(enabled: bool) -> Result<bool> {
    // SAFETY: `err` is valid.
    Ok(call(|err| unsafe { sys::tamp_jit_set_autocast_mode(enabled.into(), err) })? != 0)
}

/// Freezes the module in a TorchScript file, and returns the bytes of the new file as a tensor.
pub(crate) fn jit_freeze(file: &[u8]) -> Result<Tensor> {
    // SAFETY: the pointer and the length are those of a slice, and `err` is valid.
    given(call(|err| unsafe { sys::tamp_jit_freeze(file.as_ptr(), file.len(), err) })?)
}

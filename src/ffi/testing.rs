//! Hooks for the tests of this crate.

use crate::sys;

/// Makes the `call`-th function of the shim from now on fail; see `csrc/testing.cpp`.
pub(crate) fn testing_fail_at(call: i64, kind: u8) -> i64 {
    // SAFETY: sets two numbers of the calling thread.
    unsafe { sys::tamp_testing_fail_at(call, kind) }
}

/// Enters or leaves inference mode.
pub(crate) fn testing_inference_mode(enabled: bool) {
    // SAFETY: holds or drops a guard of the calling thread.
    unsafe { sys::tamp_testing_inference_mode(enabled.into()) }
}

/// Does what a sanitizer has to find.
pub(crate) fn testing_fault(kind: u8) {
    // SAFETY: there is none; a build without a sanitizer must not call it.
    unsafe { sys::tamp_testing_fault(kind) }
}

/// Has the optimizers of this thread treat the CPU as they do other devices.
pub(crate) fn testing_as_other_device(enabled: bool) {
    // SAFETY: it only sets a flag of the calling thread.
    unsafe { sys::tamp_testing_as_other_device(enabled.into()) }
}

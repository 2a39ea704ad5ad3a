//! Hooks for the tests of this crate.

use crate::sys;

/// Makes the `call`-th call of the shim from now on fail; see `csrc/border/testing.cpp`.
pub(crate) fn testing_fail_at(call: i64, kind: u8) -> i64 {
    // SAFETY: sets two numbers of the calling thread.
    unsafe { sys::tamp_testing_fail_at(call, kind) }
}

/// Enters or leaves inference mode.
pub(crate) fn testing_inference_mode(enabled: bool) {
    // SAFETY: holds or drops a guard of the calling thread.
    unsafe { sys::tamp_testing_inference_mode(enabled.into()) }
}

/// Commits a fault that a sanitizer must find.
pub(crate) fn testing_fault(kind: u8) {
    // SAFETY: not safe on purpose. Only builds with a sanitizer, which ends the process, call it.
    unsafe { sys::tamp_testing_fault(kind) }
}

/// Makes the optimizers of this thread treat the CPU like other devices.
pub(crate) fn testing_as_other_device(enabled: bool) {
    // SAFETY: it only sets a flag of the calling thread.
    unsafe { sys::tamp_testing_as_other_device(enabled.into()) }
}

/// Makes another engine than this crate's run the backward passes of the process.
pub(crate) fn testing_engine(kind: u8) {
    // SAFETY: sets a pointer that libtorch reads atomically, to a function that returns an engine that is never freed.
    unsafe { sys::tamp_testing_engine(kind) }
}

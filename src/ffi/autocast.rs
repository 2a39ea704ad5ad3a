//! The autocast state of a thread.

use super::call;
use crate::error::Result;
use crate::sys;

/// Reads the autocast state of the device types that `state` names.
pub(crate) fn autocast_read(state: &mut sys::AutocastState) -> Result<()> {
    assert!(usize::from(state.count) <= sys::AUTOCAST_DEVICES);
    // SAFETY: `state` is a whole struct of the shim's layout, and `count` stays within its array.
    call(|err| unsafe { sys::tamp_autocast_read(state, err) })
}

/// Opens a region: the state is `next`.
pub(crate) fn autocast_enter(next: &sys::AutocastState, outermost: bool) -> Result<()> {
    assert!(usize::from(next.count) <= sys::AUTOCAST_DEVICES);
    // SAFETY: `next` has the shim's layout and outlives the call, and `count` stays within its array.
    call(|err| unsafe { sys::tamp_autocast_enter(next, outermost.into(), err) })
}

/// Closes a region: the state is `previous` again.
pub(crate) fn autocast_exit(previous: &sys::AutocastState, outermost: bool) {
    // SAFETY: `previous` is a whole struct that `autocast_read` filled.
    unsafe { sys::tamp_autocast_exit(previous, outermost.into()) }
}

/// Forgets every cached cast of a weight.
pub(crate) fn autocast_clear_cache() -> Result<()> {
    // SAFETY: `err` is valid for a write.
    call(|err| unsafe { sys::tamp_autocast_clear_cache(err) })
}

/// The number of the backward that runs on this thread, the innermost of several; -1 where none does.
pub(crate) fn autocast_backward() -> i64 {
    // SAFETY: takes nothing and reads a number of the calling thread.
    unsafe { sys::tamp_autocast_backward() }
}

/// Has `settle` called on this thread when the backward that runs here has ended and libtorch has restored the thread's
/// state. It must not unwind.
pub(crate) fn autocast_after_backward(settle: extern "C" fn()) {
    // SAFETY: `settle` is a safe function without parameters, which may be called at any time.
    unsafe { sys::tamp_autocast_after_backward(settle) }
}

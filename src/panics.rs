//! What to do with a panic that must not go on.

use std::any::Any;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::without_backtrace;

/// The message of a panic, without a C++ backtrace. Its payload is dropped, also where that panics.
pub(crate) fn into_message(payload: Box<dyn Any + Send>) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    let text = without_backtrace(text.unwrap_or("a panic without a message")).to_owned();
    swallow(|| drop(payload));
    text
}

/// Runs `f`; a panic has been reported by the hook and goes no further.
pub(crate) fn swallow(f: impl FnOnce()) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(f)) {
        // Its destructor may panic as well, and somewhere that has to end.
        let inner = catch_unwind(AssertUnwindSafe(|| drop(payload)));
        inner.unwrap_or_else(mem::forget);
    }
}

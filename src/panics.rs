//! Handling of panics that must not unwind any further.
//!
//! A panic must not cross the border to C++, and a second one would abort the process while the first unwinds.

use std::any::Any;
use std::cell::RefCell;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::LocalKey;

use crate::error::without_backtrace;

/// Returns the message of a panic, without a C++ backtrace. Drops the payload, and catches a panic of its destructor.
pub(crate) fn into_message(payload: Box<dyn Any + Send>) -> String {
    let text = message(payload.as_ref()).to_owned();
    swallow(|| drop(payload));
    text
}

/// Returns the message of a panic, without a C++ backtrace.
pub(crate) fn message(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    without_backtrace(text.unwrap_or("a panic without a message"))
}

/// Runs `f`, and catches its panic, which the panic hook has already reported.
pub(crate) fn swallow(f: impl FnOnce()) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(f)) {
        // The payload's destructor may panic as well. The payload of that panic is leaked, so that this ends.
        let inner = catch_unwind(AssertUnwindSafe(|| drop(payload)));
        inner.unwrap_or_else(mem::forget);
    }
}

/// Locks what a panic of another thread leaves whole.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Another value of a thread's variable, which has its own again when this is dropped, also by a panic.
pub(crate) struct Exchanged<T: 'static> {
    variable: &'static LocalKey<RefCell<T>>,
    before: Option<T>,
}

impl<T> Exchanged<T> {
    pub(crate) fn new(variable: &'static LocalKey<RefCell<T>>, value: T) -> Self {
        Self { variable, before: Some(variable.replace(value)) }
    }

    /// Puts the variable's own value back, and returns what the other one has become.
    pub(crate) fn end(mut self) -> Option<T> {
        self.before.take().map(|before| self.variable.replace(before))
    }
}

impl<T> Drop for Exchanged<T> {
    fn drop(&mut self) {
        if let Some(before) = self.before.take() {
            drop(self.variable.replace(before));
        }
    }
}

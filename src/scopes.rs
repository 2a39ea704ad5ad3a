//! The autocast regions that are open on a thread, innermost last.

#![forbid(unsafe_code)]

use std::cell::RefCell;

use crate::error::{Error, Result};
use crate::{ffi, sys};

struct Scope {
    id: u64,
    /// What the region replaced.
    previous: sys::AutocastState,
    /// Its guard is gone, but regions inside of it are still open.
    closed: bool,
}

struct Scopes {
    next_id: u64,
    open: Vec<Scope>,
}

thread_local! {
    static SCOPES: RefCell<Scopes> = const { RefCell::new(Scopes { next_id: 0, open: Vec::new() }) };
}

impl Scopes {
    fn open(&mut self, previous: sys::AutocastState, next: &sys::AutocastState) -> Result<u64> {
        ffi::autocast_enter(next, self.open.is_empty())?;
        let id = self.next_id;
        self.next_id += 1;
        self.open.push(Scope {
            id,
            previous,
            closed: false,
        });
        Ok(id)
    }

    fn close(&mut self, id: u64) {
        // From the end: guards are nearly always dropped in reverse order.
        if let Some(scope) = self.open.iter_mut().rev().find(|scope| scope.id == id) {
            scope.closed = true;
        }
        while self.open.last().is_some_and(|scope| scope.closed) {
            self.pop();
        }
    }

    /// Closes the region and all that were opened after it, whether their guards are gone or not.
    fn close_through(&mut self, id: u64) {
        while self.open.last().is_some_and(|scope| scope.id >= id) {
            self.pop();
        }
        self.close(id);
    }

    fn pop(&mut self) {
        if let Some(scope) = self.open.pop() {
            ffi::autocast_exit(&scope.previous, self.open.is_empty());
        }
    }
}

/// Opens a region, which replaces `previous` by `next`, and returns the number that closes it.
pub(crate) fn open(previous: sys::AutocastState, next: sys::AutocastState) -> Result<u64> {
    SCOPES
        .try_with(|scopes| scopes.borrow_mut().open(previous, &next))
        .unwrap_or(Err(Error::ThreadEnding))
}

/// Closes the region `id`, at once if it is the innermost, else with the last one inside of it.
pub(crate) fn close(id: u64) {
    // Without a stack the thread is ending, and its autocast state ends with it.
    SCOPES
        .try_with(|scopes| scopes.borrow_mut().close(id))
        .unwrap_or(());
}

/// Runs `f` in a region that ends with it, together with everything opened inside.
pub(crate) fn within<T>(
    previous: sys::AutocastState,
    next: sys::AutocastState,
    f: impl FnOnce() -> T,
) -> Result<T> {
    struct CloseOnDrop(u64);
    impl Drop for CloseOnDrop {
        fn drop(&mut self) {
            let close = |scopes: &RefCell<Scopes>| scopes.borrow_mut().close_through(self.0);
            SCOPES.try_with(close).unwrap_or(());
        }
    }
    let _close = CloseOnDrop(open(previous, next)?);
    Ok(f())
}

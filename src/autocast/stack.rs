//! The autocast regions that are open on a thread, innermost last.
//!
//! Whether autocast is enabled is part of what libtorch restores by itself after each node of a backward, without a word
//! to anybody. The callbacks that nodes run stand on the stack, too, so that regions never end across their borders:
//! what is opened inside of a callback ends with it, and what was open around it ends after it, once libtorch has
//! restored the state.

use std::cell::RefCell;

use crate::error::{AutocastError, Error, Result};
use crate::ffi::AutocastState;
use crate::{ffi, panics};

struct Scope {
    id: u64,
    kind: Kind,
    /// Its guard is gone, but scopes inside of it are still open, or were when it went.
    closed: bool,
}

enum Kind {
    /// A region, and what it replaced.
    Region(AutocastState),
    /// A callback, and the number of the backward that runs it.
    Callback(i64),
}

struct Stack {
    next_id: u64,
    scopes: Vec<Scope>,
}

thread_local! {
    static STACK: RefCell<Stack> = const { RefCell::new(Stack { next_id: 0, scopes: Vec::new() }) };
}

impl Stack {
    fn push(&mut self, kind: Kind) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.scopes.push(Scope { id, kind, closed: false });
        id
    }

    /// Takes off the innermost scope if it ends now.
    fn pop_if(&mut self, ends: impl FnOnce(&Scope) -> bool) -> Option<Kind> {
        self.scopes.pop_if(|scope| ends(scope)).map(|scope| scope.kind)
    }

    fn close(&mut self, id: u64) {
        // From the end: guards are nearly always dropped in reverse order.
        if let Some(scope) = self.scopes.iter_mut().rev().find(|scope| scope.id == id) {
            scope.closed = true;
        }
    }

    /// Whether the next region will be the outermost. Callbacks are few, so that the answer is found at once.
    fn is_outside(&self) -> bool {
        !self.scopes.iter().any(|scope| matches!(scope.kind, Kind::Region(_)))
    }

    /// Whether the innermost scope is a region that was closed within a callback inside of it.
    fn is_late(&self) -> bool {
        self.scopes.last().is_some_and(|scope| scope.closed)
    }

    /// The number of the backward that runs the innermost callback; -1 outside of them, as libtorch counts.
    fn backward(&self) -> i64 {
        let backward = |scope: &Scope| match scope.kind {
            Kind::Callback(backward) => Some(backward),
            Kind::Region(_) => None,
        };
        self.scopes.iter().rev().find_map(backward).unwrap_or(-1)
    }
}

/// Borrows the thread's stack; `None` where the thread is ending, and its autocast state with it. `f` only looks and
/// notes: whatever goes to libtorch may run destructors of the user's, which come back here.
fn with<T>(f: impl FnOnce(&mut Stack) -> T) -> Option<T> {
    STACK.try_with(|stack| f(&mut stack.borrow_mut())).ok()
}

/// Ends the innermost scopes for as long as they are such.
fn end_while(ends: impl Fn(&Scope) -> bool) {
    let pop = |stack: &mut Stack| Some((stack.pop_if(&ends)?, stack.is_outside()));
    while let Some((kind, outermost)) = with(pop).flatten() {
        if let Kind::Region(previous) = kind {
            previous.exit_to(outermost);
        }
    }
}

/// Opens a region, which replaces `previous` by `next`, and returns the number that closes it.
pub(super) fn open(previous: AutocastState, next: AutocastState) -> Result<u64> {
    let push = |stack: &mut Stack| (stack.is_outside(), stack.push(Kind::Region(previous)));
    let (outermost, id) = with(push).ok_or(Error::Autocast(AutocastError::ThreadEnding))?;
    let entered = next.enter(outermost);
    if entered.is_err() {
        with(|stack| stack.pop_if(|scope| scope.id == id));
    }
    entered.map(|()| id)
}

/// Closes the region `id`, at once if it is the innermost, else with the last scope inside of it.
pub(super) fn close(id: u64) {
    with(|stack| stack.close(id));
    settle();
}

/// Ends the regions that were closed and have nothing open inside of them any more.
pub(super) fn settle() {
    end_while(|scope| scope.closed);
}

/// Runs `f` in a region that ends with it, together with everything opened inside.
pub(super) fn within<T>(
    previous: AutocastState,
    next: AutocastState,
    f: impl FnOnce() -> T,
) -> Result<T> {
    let id = open(previous, next)?;
    let _close = OnDrop(|| {
        end_while(|scope| scope.id >= id);
        settle();
    });
    Ok(f())
}

/// Runs `f`, which libtorch has called back: regions opened inside end with it, and others that are closed inside end
/// when libtorch has restored what the thread's state was before.
pub(crate) fn callback<T>(f: impl FnOnce() -> T) -> T {
    let backward = ffi::autocast_backward();
    let id = with(|stack| stack.push(Kind::Callback(backward)));
    let _end = id.map(|id| OnDrop(move || end_callback(id)));
    f()
}

fn end_callback(id: u64) {
    end_while(|scope| scope.id >= id);
    let late = |stack: &mut Stack| stack.is_late().then(|| stack.backward());
    match with(late).flatten() {
        None => {}
        // Where a destructor runs without a node around it, nothing will be restored.
        Some(around) if around == ffi::autocast_backward() => settle(),
        Some(_) => ffi::autocast_after_backward(settle_after_backward),
    }
}

extern "C" fn settle_after_backward() {
    panics::swallow(settle);
}

struct OnDrop<F: Fn()>(F);

impl<F: Fn()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

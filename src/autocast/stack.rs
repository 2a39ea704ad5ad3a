//! The stack of the autocast regions that are open on a thread, innermost last.
//!
//! libtorch saves and restores the enabled flags around each node of a backward by itself. The callbacks that run
//! inside nodes are therefore on the stack as well, and regions never end across the border of a callback: a region
//! that is opened inside a callback ends with it, and one that was open before ends afterwards, once libtorch has
//! restored the state.

#[cfg(feature = "distributed")]
use std::cell::Cell;
use std::cell::RefCell;

use tch::Device;
#[cfg(feature = "distributed")]
use tch::Kind;

use crate::error::{AutocastError, Error, Result};
use crate::ffi::RawAutocastState;
use crate::{ffi, panics};

struct Scope {
    id: u64,
    kind: ScopeKind,
    /// Its guard was dropped while scopes inside it were still open.
    closed: bool,
}

enum ScopeKind {
    /// A region, with the state that it replaced.
    Region(RawAutocastState),
    /// A callback, with the number of the backward that runs it.
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
    fn push(&mut self, kind: ScopeKind) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.scopes.push(Scope { id, kind, closed: false });
        id
    }

    /// Removes the innermost scope if `ends` holds for it.
    fn pop_if(&mut self, ends: impl FnOnce(&Scope) -> bool) -> Option<ScopeKind> {
        self.scopes.pop_if(|scope| ends(scope)).map(|scope| scope.kind)
    }

    fn close(&mut self, id: u64) {
        // The search starts at the end because guards are nearly always dropped in reverse order.
        if let Some(scope) = self.scopes.iter_mut().rev().find(|scope| scope.id == id) {
            scope.closed = true;
        }
    }

    /// Returns whether no region is open on the thread.
    fn is_outside(&self) -> bool {
        !self.scopes.iter().any(|scope| matches!(scope.kind, ScopeKind::Region(_)))
    }

    /// Returns whether the innermost scope is a region that was closed from within a callback inside it.
    fn is_late(&self) -> bool {
        self.scopes.last().is_some_and(|scope| scope.closed)
    }

    /// The number of the backward that runs the innermost callback; outside of callbacks -1, as in libtorch.
    fn backward(&self) -> i64 {
        let backward = |scope: &Scope| match scope.kind {
            ScopeKind::Callback(backward) => Some(backward),
            ScopeKind::Region(_) => None,
        };
        self.scopes.iter().rev().find_map(backward).unwrap_or(-1)
    }
}

/// Borrows the thread's stack; `None` if the thread is ending. `f` must not call libtorch: that may run the user's
/// destructors, which borrow the stack again.
fn with<T>(f: impl FnOnce(&mut Stack) -> T) -> Option<T> {
    STACK.try_with(|stack| f(&mut stack.borrow_mut())).ok()
}

/// Ends the innermost scope repeatedly, as long as `ends` holds for it.
fn end_while(ends: impl Fn(&Scope) -> bool) {
    let pop = |stack: &mut Stack| Some((stack.pop_if(&ends)?, stack.is_outside()));
    while let Some((kind, outermost)) = with(pop).flatten() {
        if let ScopeKind::Region(previous) = kind {
            previous.exit_to(outermost);
        }
    }
}

/// Opens a region, which replaces `previous` by `next`, and returns the number that closes it.
pub(super) fn open(previous: RawAutocastState, next: RawAutocastState) -> Result<u64> {
    let push = |stack: &mut Stack| (stack.is_outside(), stack.push(ScopeKind::Region(previous)));
    let (outermost, id) = with(push).ok_or(Error::Autocast(AutocastError::ThreadEnding))?;
    let entered = next.enter(outermost);
    if entered.is_err() {
        with(|stack| stack.pop_if(|scope| scope.id == id));
    }
    #[cfg(feature = "distributed")]
    if entered.is_ok() {
        note_dtype(&next);
    }
    entered.map(|()| id)
}

#[cfg(feature = "distributed")]
thread_local! {
    /// The device whose regions are looked at, and the dtype of the first.
    static FIRST: Cell<Option<(Device, Option<Kind>)>> = const { Cell::new(None) };
}

/// Notes the dtype of a state if it is the first that is enabled on the device that is looked at.
#[cfg(feature = "distributed")]
fn note_dtype(state: &RawAutocastState) {
    if let Some((device, None)) = FIRST.get()
        && state.is_enabled(device)
    {
        FIRST.set(Some((device, state.dtype(device).ok())));
    }
}

/// Runs `f`, and returns the dtype of the first region for this type of device that is open within it on the thread;
/// `None` if there is none.
#[cfg(feature = "distributed")]
pub(crate) fn first_dtype<T>(device: Device, f: impl FnOnce() -> T) -> (T, Option<Kind>) {
    let around = FIRST.replace(Some((device, None)));
    if let Ok(state) = read(&[device]) {
        note_dtype(&state);
    }
    let out = f();
    let first = FIRST.replace(around).and_then(|(_, first)| first);
    (out, first)
}

/// Closes the region `id`: at once if it is the innermost, otherwise with the last scope inside it.
pub(super) fn close(id: u64) {
    with(|stack| stack.close(id));
    settle();
}

/// Ends the closed regions that no longer contain an open scope.
pub(super) fn settle() {
    end_while(|scope| scope.closed);
}

/// Reads the calling thread's state for some devices, and its cache flag.
pub(super) fn read(devices: &[Device]) -> Result<RawAutocastState> {
    settle();
    RawAutocastState::read(devices)
}

/// Runs `f` in a region that ends with it, as do all regions opened inside.
pub(super) fn within<T>(
    previous: RawAutocastState,
    next: RawAutocastState,
    f: impl FnOnce() -> T,
) -> Result<T> {
    let id = open(previous, next)?;
    let _close = OnDrop(|| {
        end_while(|scope| scope.id >= id);
        settle();
    });
    Ok(f())
}

/// Runs `f` as a callback from libtorch: regions opened inside end with it, and outer regions that are closed inside
/// end once libtorch has restored the thread's state.
pub(crate) fn callback<T>(f: impl FnOnce() -> T) -> T {
    let backward = ffi::autocast_backward();
    let id = with(|stack| stack.push(ScopeKind::Callback(backward)));
    let _end = id.map(|id| OnDrop(move || end_callback(id)));
    f()
}

fn end_callback(id: u64) {
    end_while(|scope| scope.id >= id);
    let late = |stack: &mut Stack| stack.is_late().then(|| stack.backward());
    match with(late).flatten() {
        None => {}
        // A destructor that does not run inside a node: libtorch will restore nothing afterwards.
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

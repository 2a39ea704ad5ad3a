//! The autocast regions that are open on a thread, innermost last.

#![forbid(unsafe_code)]

use std::cell::RefCell;

use crate::error::{Error, Result};
use crate::{ffi, sys};

struct Region {
    id: u64,
    /// What the region replaced.
    previous: sys::AutocastState,
    /// Its guard is gone, but regions inside of it are still open.
    closed: bool,
}

struct Regions {
    next_id: u64,
    open: Vec<Region>,
}

thread_local! {
    static REGIONS: RefCell<Regions> = const { RefCell::new(Regions { next_id: 0, open: Vec::new() }) };
}

impl Regions {
    fn open(&mut self, previous: sys::AutocastState, next: &sys::AutocastState) -> Result<u64> {
        ffi::autocast_enter(next, self.open.is_empty())?;
        let id = self.next_id;
        self.next_id += 1;
        self.open.push(Region { id, previous, closed: false });
        Ok(id)
    }

    fn close(&mut self, id: u64) {
        // From the end: guards are nearly always dropped in reverse order.
        if let Some(region) = self.open.iter_mut().rev().find(|region| region.id == id) {
            region.closed = true;
        }
        self.pop_closed();
    }

    fn pop_closed(&mut self) {
        while self.open.last().is_some_and(|region| region.closed) {
            self.pop();
        }
    }

    /// Closes the region and all that were opened after it, whether their guards are gone or not.
    fn close_through(&mut self, id: u64) {
        while self.open.last().is_some_and(|region| region.id >= id) {
            self.pop();
        }
        self.pop_closed();
    }

    fn pop(&mut self) {
        if let Some(region) = self.open.pop() {
            ffi::autocast_exit(&region.previous, self.open.is_empty());
        }
    }
}

/// Opens a region, which replaces `previous` by `next`, and returns the number that closes it.
pub(super) fn open(previous: sys::AutocastState, next: sys::AutocastState) -> Result<u64> {
    REGIONS
        .try_with(|regions| regions.borrow_mut().open(previous, &next))
        .unwrap_or(Err(Error::ThreadEnding))
}

/// Closes the region `id`, at once if it is the innermost, else with the last one inside of it.
pub(super) fn close(id: u64) {
    // Without a stack the thread is ending, and its autocast state ends with it.
    REGIONS.try_with(|regions| regions.borrow_mut().close(id)).unwrap_or(());
}

/// Runs `f` in a region that ends with it, together with everything opened inside.
pub(super) fn within<T>(
    previous: sys::AutocastState,
    next: sys::AutocastState,
    f: impl FnOnce() -> T,
) -> Result<T> {
    struct CloseOnDrop(u64);
    impl Drop for CloseOnDrop {
        fn drop(&mut self) {
            let close = |regions: &RefCell<Regions>| regions.borrow_mut().close_through(self.0);
            REGIONS.try_with(close).unwrap_or(());
        }
    }
    let _close = CloseOnDrop(open(previous, next)?);
    Ok(f())
}

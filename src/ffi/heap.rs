//! The memory of the process.

use crate::sys;

/// Has the C library keep freed memory. Returns whether it can.
pub(crate) fn heap_keep() -> bool {
    // SAFETY: takes nothing, and sets options of the C library's allocator under that one's own lock.
    unsafe { sys::tamp_heap_keep() != 0 }
}

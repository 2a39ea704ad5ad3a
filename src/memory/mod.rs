//! The memory of the process and of devices: how much is used, and what happens to it when it is freed.

mod device;
mod resident;

use crate::ffi;

pub use device::DeviceMemory;
pub use resident::Resident;

/// Keeps freed memory in the process, so that the activations of the next iteration need not be mapped and zeroed by the
/// kernel again. Returns whether the C library can do so.
///
/// On a CPU, libtorch frees every activation, and glibc gives blocks of 128 KiB or more back to the kernel at once.
/// Getting them back costs page faults. Call this at the start of `main` in a program that trains on a CPU, and train on
/// the main thread: other threads have heaps of their own, from which large blocks are still given back.
///
/// It applies to the whole process and cannot be undone. Resident memory then stays at its peak, or some blocks above
/// it: what is freed is used again by this process, but not by others. It sets `M_TRIM_THRESHOLD`, `M_MMAP_MAX` and
/// `M_TOP_PAD` of glibc's `mallopt`, and does nothing with other C libraries or allocators, nor for the memory of GPUs,
/// which libtorch keeps by itself. The environment variables `MALLOC_TRIM_THRESHOLD_=-1`, `MALLOC_MMAP_MAX_=0` and
/// `MALLOC_TOP_PAD_=67108864` do the same for any program.
///
/// For a program that trains on another thread, the environment variable `MALLOC_ARENA_MAX=1` makes all threads share
/// the heap. They then wait for each other while they allocate, which costs more than it gains if libtorch computes with
/// several threads.
///
/// # Examples
///
/// ```
/// if !tch_amp::memory::keep_freed_memory() {
///     eprintln!("freed memory goes back to the system");
/// }
/// ```
pub fn keep_freed_memory() -> bool {
    ffi::heap_keep()
}

//! The memory of the process and of devices: how much is used, and what happens to it when it is freed.

mod device;
mod resident;

use crate::error::Result;
use crate::ffi;

pub use device::DeviceMemory;
pub use resident::Resident;

/// Runs a closure, and returns its result and the peak of the CPU memory that tensors of this thread took meanwhile, in
/// bytes beyond those that existed before. For an iteration, that is the memory of its activations and of what is made
/// beside them. For GPUs, see [`DeviceMemory`].
///
/// libtorch's allocator reports every tensor, so the number is the same in every run, unlike the pages of
/// [`Resident`]. Backward passes that the closure starts are included; tensors that other threads make and what
/// libraries allocate for themselves are not. Corresponds to the peak of
/// `torch.profiler.profile(profile_memory=True)`.
///
/// # Errors
///
/// [`Error::Torch`](crate::Error::Torch) if memory for the count cannot be allocated, and while a profiler of libtorch
/// runs on this thread; the closure is not run then.
///
/// # Examples
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use tch_amp::memory::peak_during;
///
/// let (sum, bytes) = peak_during(|| {
///     let x = Tensor::ones([1024], (Kind::Float, Device::Cpu));
///     (&x + &x).sum(Kind::Float)
/// })?;
/// assert_eq!(sum.double_value(&[]), 2048.0);
/// assert!((8192..8192 + 256).contains(&bytes), "{bytes}");
/// # Ok::<(), tch_amp::Error>(())
/// ```
pub fn peak_during<T>(f: impl FnOnce() -> T) -> Result<(T, u64)> {
    let count = ffi::Allocations::count()?;
    let result = f();
    Ok((result, count.end()))
}

/// Keeps freed memory in the process, so that the activations of the next iteration need not be mapped and zeroed by
/// the kernel again. Returns whether the C library can do so.
///
/// On a CPU, libtorch frees every activation, and glibc gives blocks of 128 KiB or more back to the kernel at once.
/// Getting them back costs page faults. Call this at the start of `main` in a program that trains on a CPU, and train
/// on the main thread: other threads have heaps of their own, from which large blocks are still given back.
///
/// It applies to the whole process and cannot be undone. Resident memory then stays at its peak, or some blocks above
/// it: what is freed is used again by this process, but not by others. It sets `M_TRIM_THRESHOLD`, `M_MMAP_MAX` and
/// `M_TOP_PAD` of glibc's `mallopt`, and does nothing with other C libraries or allocators, nor for the memory of GPUs,
/// which libtorch keeps by itself. The environment variables `MALLOC_TRIM_THRESHOLD_=-1`, `MALLOC_MMAP_MAX_=0` and
/// `MALLOC_TOP_PAD_=67108864` do the same for any program.
///
/// For a program that trains on another thread, the environment variable `MALLOC_ARENA_MAX=1` makes all threads share
/// the heap. They then wait for each other while they allocate, which costs more than it gains if libtorch computes
/// with several threads.
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

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use tch::{Device, Kind, Tensor};

    use super::*;

    const KIB: i64 = 1 << 10;

    /// `kib` KiB of numbers.
    fn tensor(kib: i64) -> Tensor {
        Tensor::zeros([kib * KIB / 4], (Kind::Float, Device::Cpu))
    }

    /// How many KiB a closure takes at most, rounded down.
    fn peak<T>(f: impl FnOnce() -> T) -> i64 {
        let (kept, bytes) = peak_during(f).unwrap();
        drop(kept);
        bytes as i64 / KIB
    }

    #[test]
    fn what_is_alive_at_once_counts() {
        assert_eq!(peak(|| (drop(tensor(64)), tensor(16), tensor(32))), 64);
        assert_eq!(peak(|| (tensor(64), drop(tensor(16)), tensor(32))), 96);
        let before = tensor(64);
        assert_eq!(peak(|| (drop(before), tensor(16))), 16, "what was there before does not count");
        assert_eq!(peak(|| ()), 0);
    }

    #[test]
    fn a_backward_pass_counts() {
        let w = tensor(64).set_requires_grad(true);
        let loss = (&w * 2.0).sum(Kind::Float);
        let peak = peak(|| loss.backward());
        assert!((64..=192).contains(&peak), "{peak} KiB for a gradient of 64 KiB");
    }

    #[test]
    fn counts_end_with_a_panic_and_may_be_nested() {
        let inner = |outer: &mut i64| *outer = peak(|| tensor(8));
        let mut in_panic = 0;
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            drop(peak_during(|| {
                inner(&mut in_panic);
                panic!("in the closure")
            }));
        }));
        assert!(panicked.is_err() && in_panic == 8);
        assert_eq!(peak(|| (tensor(16), peak(|| tensor(32)), tensor(4))), 20);
    }
}

//! The memory of the process and of devices: how much is used, what happens to it when it is freed, and how autograd
//! keeps what it saves for the backward pass.

mod saved_tensors;

use tch::Device;

use crate::device::check_usable;
use crate::error::{Error, Result};
use crate::ffi;

pub use saved_tensors::SavedTensors;

/// Runs a closure, and returns its result and the peak of the CPU memory that tensors of this thread took meanwhile, in
/// bytes beyond those that existed before. For an iteration, that is the memory of its activations and of what is made
/// beside them. For GPUs, see [`DeviceMemory`].
///
/// libtorch's allocator reports every tensor, so the number is the same in every run, unlike that of the pages that the
/// system counts. Backward passes that the closure starts are included; tensors that other threads make and what
/// libraries allocate for themselves are not. Corresponds to the peak of
/// `torch.profiler.profile(profile_memory=True)`.
///
/// # Errors
///
/// [`Error::Torch`] if memory for the count cannot be allocated, and while a profiler of libtorch runs on this thread;
/// the closure is not run then.
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

/// The bytes of a device that libtorch uses for the tensors of this process, as counted by its caching allocator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceMemory {
    /// The bytes of tensors. Corresponds to `torch.cuda.memory_allocated`.
    pub allocated: u64,
    /// The most bytes of tensors since the start of the process or the last [`reset_peak`](Self::reset_peak).
    /// Corresponds to `torch.cuda.max_memory_allocated`.
    pub max_allocated: u64,
    /// The bytes that the allocator has taken from the device, with those that it keeps for later tensors. Corresponds
    /// to `torch.cuda.memory_reserved`.
    pub reserved: u64,
    /// The most bytes that it had taken since the start of the process or the last [`reset_peak`](Self::reset_peak).
    /// Corresponds to `torch.cuda.max_memory_reserved`.
    pub max_reserved: u64,
}

impl DeviceMemory {
    /// Returns how much memory of a device libtorch uses now and has used at most. It does not synchronize. The
    /// counterpart of `torch.cuda.memory_allocated` and its relatives; tch has none.
    ///
    /// The allocator counts a tensor when it is made and when it is freed, whether or not the kernels that use it have
    /// run. Memory that libraries such as cuBLAS and cuDNN allocate by themselves is not in it.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for the CPU, whose memory libtorch does not count (see [`peak_during`]);
    /// [`Error::DeviceUnavailable`] for a device that this process cannot use;
    /// [`Error::Torch`] for one whose allocator does not count.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Kind, Tensor};
    /// use tch_amp::memory::DeviceMemory;
    ///
    /// let device = Device::cuda_if_available();
    /// if device.is_cuda() {
    ///     DeviceMemory::reset_peak(device)?;
    ///     let before = DeviceMemory::read(device)?;
    ///     drop(Tensor::zeros([1 << 20], (Kind::Float, device)));
    ///     let after = DeviceMemory::read(device)?;
    ///     assert_eq!(after.allocated, before.allocated);
    ///     assert!(after.max_allocated >= before.allocated + (4 << 20));
    /// }
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn read(device: Device) -> Result<Self> {
        check(device)?;
        let bytes = ffi::device_memory(device)?.map(|bytes| u64::try_from(bytes).unwrap_or(0));
        let [allocated, max_allocated, reserved, max_reserved] = bytes;
        Ok(Self { allocated, max_allocated, reserved, max_reserved })
    }

    /// Resets the peaks of a device, so that [`read`](Self::read) returns the most that is used from now on. The
    /// counterpart of `torch.cuda.reset_peak_memory_stats`.
    ///
    /// # Errors
    ///
    /// The same as [`read`](Self::read).
    pub fn reset_peak(device: Device) -> Result<()> {
        check(device)?;
        ffi::device_memory_reset(device)
    }
}

fn check(device: Device) -> Result<()> {
    if device == Device::Cpu {
        let problem = "is the CPU, whose memory libtorch does not count; use `memory::peak_during`";
        return Err(Error::InvalidArgument { name: "device", problem: problem.to_owned() });
    }
    check_usable(device)
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

    #[test]
    fn devices_that_do_not_count_are_refused() {
        let error = DeviceMemory::read(Device::Cpu).unwrap_err();
        assert!(error.to_string().contains("use `memory::peak_during`"), "{error}");
        assert!(matches!(
            DeviceMemory::reset_peak(Device::Cpu),
            Err(Error::InvalidArgument { .. })
        ));
        for index in [64, 1000] {
            let error = DeviceMemory::read(Device::Cuda(index)).unwrap_err();
            assert!(matches!(error, Error::DeviceUnavailable { .. }), "{error}");
        }
    }
}

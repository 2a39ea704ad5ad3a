//! The memory of the process.

use std::fs;

/// The resident memory of the process, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Resident {
    /// The bytes now.
    pub now: u64,
    /// The most bytes since the process started or [`reset_peak`](Self::reset_peak) was called.
    pub peak: u64,
}

impl Resident {
    /// Returns how much memory the process has now and has had at most, as the kernel counts it (`VmRSS` and `VmHWM`),
    /// or `None` where the system does not tell, which is everywhere but on Linux.
    ///
    /// This is everything: code, data, and the tensors on the CPU. The kernel counts each thread's pages by itself
    /// first, so the numbers may lag by some hundred KiB for each thread. Freed memory that the C library keeps, as
    /// after [`keep_freed_memory`](crate::memory::keep_freed_memory), is still counted.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Kind, Tensor};
    /// use tch_amp::memory::Resident;
    ///
    /// let can_reset = Resident::reset_peak();
    /// if let (true, Some(before)) = (can_reset, Resident::read()) {
    ///     drop(Tensor::ones([16 << 20], (Kind::Float, Device::Cpu)));
    ///     if let Some(after) = Resident::read() {
    ///         println!("{} MiB at most", (after.peak - before.now) >> 20);
    ///         assert!(after.peak > before.now + (60 << 20));
    ///     }
    /// }
    /// ```
    pub fn read() -> Option<Self> {
        let status = fs::read_to_string("/proc/self/status").ok()?;
        Some(Self { now: bytes(&status, "VmRSS:")?, peak: bytes(&status, "VmHWM:")? })
    }

    /// Resets the peak of the process to what it has now, so that [`read`](Self::read) returns the most from now on.
    /// Returns whether the system allows that; some containers do not.
    pub fn reset_peak() -> bool {
        fs::write("/proc/self/clear_refs", "5").is_ok()
    }
}

/// The number of a line such as `VmRSS:   1234 kB`.
fn bytes(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_in_kib() {
        let status = "Name:\tx\nVmHWM:\t    2048 kB\nVmRSS:\t      12 kB\nVmData:\t 1 MB\n";
        assert_eq!(bytes(status, "VmHWM:"), Some(2 << 20));
        assert_eq!(bytes(status, "VmRSS:"), Some(12 << 10));
        assert_eq!((bytes(status, "VmData:"), bytes(status, "VmSwap:")), (None, None));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_peak_is_at_least_what_there_is() {
        let Resident { now, peak } = Resident::read().unwrap();
        assert!(now > 0 && peak >= now, "{now} and {peak}");
    }
}

//! The memory of a run: whether it suffices, and the peak.

use anyhow::{Result, ensure};
use std::fs;
use tch::Device;
use tch_amp::memory::{DeviceMemory, peak_during};

/// No GPU has more.
const MOST_OF_A_GPU: f64 = 1_099_511_627_776.0;

/// Fails if a run needs more memory than there is, before libtorch takes all of it. `least` is the least number of
/// bytes with which the run can do.
pub fn check_fits(least: f64, device: Device) -> Result<()> {
    let there = if device == Device::Cpu { available() } else { Some(MOST_OF_A_GPU) };
    let gib = |bytes: f64| format!("{:.1} GiB", bytes / 1_073_741_824.0);
    ensure!(
        there.is_none_or(|there| least <= there),
        "a run of this size needs at least {} of memory, and there are {}: make the model or the batch smaller",
        gib(least),
        gib(there.unwrap_or(0.0))
    );
    Ok(())
}

/// The memory that the system and the limits of a container leave, in bytes, if it is known.
fn available() -> Option<f64> {
    let info = fs::read_to_string("/proc/meminfo").ok()?;
    let system = bytes(&info, "MemAvailable:")? + bytes(&info, "SwapFree:").unwrap_or(0);
    let limits = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
    let limit = |path: &&str| fs::read_to_string(path).ok()?.trim().parse().ok();
    Some(limits.iter().filter_map(limit).fold(system as f64, f64::min))
}

/// The number of a line such as `VmRSS:   1234 kB`.
fn bytes(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// The most bytes that were resident since the process started or the peak was reset, if the system tells.
pub fn resident_peak() -> Option<u64> {
    bytes(&fs::read_to_string("/proc/self/status").ok()?, "VmHWM:")
}

/// Runs a closure, and returns its result and the peak of what tensors took meanwhile, beyond those of before.
pub fn peak_of<T>(device: Device, f: impl FnOnce() -> T) -> Result<(T, u64)> {
    if device == Device::Cpu {
        return Ok(peak_during(f)?);
    }
    let before = DeviceMemory::read(device)?.allocated;
    DeviceMemory::reset_peak(device)?;
    let result = f();
    let peak = DeviceMemory::read(device)?.max_allocated;
    Ok((result, peak.saturating_sub(before)))
}

/// The most memory that was used since `start`: of a GPU by tensors, or of the whole process on the CPU.
#[derive(Clone, Copy, Debug)]
pub struct PeakMemory(Device);

impl PeakMemory {
    /// Resets the peak; `None` if the system does not permit that.
    pub fn start(device: Device) -> Option<Self> {
        let is_reset = match device {
            Device::Cpu => fs::write("/proc/self/clear_refs", "5").is_ok(),
            _ => DeviceMemory::reset_peak(device).is_ok(),
        };
        is_reset.then_some(Self(device))
    }

    /// Bytes.
    pub fn read(self) -> Option<u64> {
        match self.0 {
            Device::Cpu => resident_peak(),
            gpu => Some(DeviceMemory::read(gpu).ok()?.max_allocated),
        }
    }
}

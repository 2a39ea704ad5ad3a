//! The memory of a run: whether it suffices, and the peak.

use anyhow::{Result, ensure};
use std::fs;
use tch::Device;
use tch_amp::memory::{DeviceMemory, Resident};

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
    let bytes = |name: &str| -> Option<f64> {
        let line = info.lines().find_map(|line| line.strip_prefix(name))?;
        Some(1024.0 * line.trim().strip_suffix("kB")?.trim().parse::<f64>().ok()?)
    };
    let system = bytes("MemAvailable:")? + bytes("SwapFree:").unwrap_or(0.0);
    let limits = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
    let limit = |path: &&str| fs::read_to_string(path).ok()?.trim().parse().ok();
    Some(limits.iter().filter_map(limit).fold(system, f64::min))
}

/// The most memory that was used since `start`: of a GPU by tensors, or of the whole process on the CPU.
#[derive(Clone, Copy, Debug)]
pub struct PeakMemory(Device);

impl PeakMemory {
    /// Resets the peak; `None` if the system does not permit that.
    pub fn start(device: Device) -> Option<Self> {
        let is_reset = match device {
            Device::Cpu => Resident::reset_peak(),
            _ => DeviceMemory::reset_peak(device).is_ok(),
        };
        is_reset.then_some(Self(device))
    }

    /// Bytes.
    pub fn read(self) -> Option<u64> {
        match self.0 {
            Device::Cpu => Some(Resident::read()?.peak),
            gpu => Some(DeviceMemory::read(gpu).ok()?.max_allocated),
        }
    }
}

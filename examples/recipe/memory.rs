//! The peak memory of a run.

use tch::Device;
use tch_amp::memory;

/// The most memory that was used since `start`: of a GPU by tensors, or of the whole process on the CPU.
#[derive(Clone, Copy, Debug)]
pub struct PeakMemory(Device);

impl PeakMemory {
    /// Resets the peak; `None` if the system does not permit that.
    pub fn start(device: Device) -> Option<Self> {
        let is_reset = match device {
            Device::Cpu => memory::reset_peak_resident(),
            _ => memory::reset_peak(device).is_ok(),
        };
        is_reset.then_some(Self(device))
    }

    /// Bytes.
    pub fn read(self) -> Option<u64> {
        match self.0 {
            Device::Cpu => Some(memory::resident()?.peak),
            gpu => Some(memory::device(gpu).ok()?.max_allocated),
        }
    }
}

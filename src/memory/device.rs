//! The memory of devices.

use tch::Device;

use crate::device::check_usable;
use crate::error::{Error, Result};
use crate::ffi;

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
    /// [`Error::InvalidArgument`] for the CPU, whose memory libtorch does not count (see
    /// [`Resident`](crate::memory::Resident)); [`Error::DeviceUnavailable`] for a device that this process cannot use;
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
        let problem = "is the CPU, whose memory libtorch does not count; use `memory::Resident`";
        return Err(Error::InvalidArgument { name: "device", problem: problem.to_owned() });
    }
    check_usable(device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_that_do_not_count_are_refused() {
        let error = DeviceMemory::read(Device::Cpu).unwrap_err();
        assert!(error.to_string().contains("use `memory::Resident`"), "{error}");
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

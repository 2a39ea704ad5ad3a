//! The memory of the process, and that of devices.

use tch::Device;

use super::{call, device_type};
use crate::error::{Error, Result};
use crate::sys;

/// Makes the C library keep freed memory. Returns whether it can.
pub(crate) fn heap_keep() -> bool {
    // SAFETY: takes nothing, and sets options of the C library's allocator under that one's own lock.
    unsafe { sys::tamp_heap_keep() != 0 }
}

/// The type and the index of a device, as libtorch numbers them.
fn device_codes(device: Device) -> Result<(i8, i8)> {
    let index = match device {
        Device::Cuda(index) => i8::try_from(index)
            .map_err(|_| Error::Torch(format!("there is no CUDA device {index}")))?,
        _ => 0,
    };
    Ok((device_type(device)?, index))
}

/// The bytes that libtorch's allocator of a device counts: in tensors now and at most, and taken from the device now
/// and at most.
pub(crate) fn device_memory(device: Device) -> Result<[i64; 4]> {
    let (device_type, index) = device_codes(device)?;
    let mut out = sys::DeviceMemory::default();
    // SAFETY: `out` and `err` are valid for writes.
    call(|err| unsafe { sys::tamp_device_memory_read(device_type, index, &mut out, err) })?;
    Ok([out.allocated, out.max_allocated, out.reserved, out.max_reserved])
}

/// Resets the peaks of a device.
pub(crate) fn device_memory_reset(device: Device) -> Result<()> {
    let (device_type, index) = device_codes(device)?;
    // SAFETY: `err` is valid for a write.
    call(|err| unsafe { sys::tamp_device_memory_reset(device_type, index, err) })
}

/// Counts the CPU memory that libtorch allocates on this thread while it lives. It stays on its thread, because the
/// pointer is not `Send`.
#[derive(Debug)]
pub(crate) struct Allocations(*mut sys::Allocations);

impl Allocations {
    pub(crate) fn count() -> Result<Self> {
        // SAFETY: `err` is valid for a write.
        Ok(Self(call(|err| unsafe { sys::tamp_allocations_count(err) })?))
    }

    /// Ends the count, which must be the last that began on this thread, and returns the most bytes.
    pub(crate) fn end(mut self) -> u64 {
        self.take()
    }

    fn take(&mut self) -> u64 {
        let count = std::mem::replace(&mut self.0, std::ptr::null_mut());
        if count.is_null() {
            return 0;
        }
        // SAFETY: it comes from the shim on this thread and was not ended, or it would be null.
        unsafe { sys::tamp_allocations_end(count) }
    }
}

impl Drop for Allocations {
    fn drop(&mut self) {
        self.take();
    }
}

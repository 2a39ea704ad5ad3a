//! The memory of tensors, of the process and of devices: shapes, stamps that detect writes, the bytes of elements, what
//! is allocated, and the states of random number generators.

use tch::{Device, Tensor};

use super::{call, device_type, given, place, pointer, pointers};
use crate::error::{Error, Result};
use crate::sys;

/// Returns the shape of a tensor. For a tensor without one it returns an error, where tch panics.
pub(crate) fn sizes(tensor: &Tensor) -> Result<Vec<i64>> {
    let mut sizes = vec![0; 8];
    loop {
        let (out, room) = (sizes.as_mut_ptr(), sizes.len());
        // SAFETY: the tensor is alive, and the shim writes at most `room` numbers to `out`.
        let dim = call(|err| unsafe { sys::tamp_sizes(tensor.as_ptr(), out, room, err) })?;
        sizes.resize(dim, 0);
        if dim <= room {
            return Ok(sizes);
        }
    }
}

/// Returns whether a tensor has a shape and memory with an element for each place of it. Sparse and nested ones and
/// those of other libraries do not.
pub(crate) fn is_dense(tensor: &Tensor) -> Result<bool> {
    // SAFETY: the tensor is alive, and `err` is valid for a write.
    Ok(call(|err| unsafe { sys::tamp_is_dense(tensor.as_ptr(), err) })? != 0)
}

/// Returns the places of two of the tensors that have memory in common; `None` if all are apart.
pub(crate) fn overlapping(tensors: &[Tensor]) -> Result<Option<(usize, usize)>> {
    let pointers = pointers(tensors);
    let (array, count, mut one, mut other) = (pointers.as_ptr(), pointers.len(), 0, 0);
    // SAFETY: the array has `count` elements, the borrow keeps the tensors alive, and `one` and `other` are valid for a
    // write.
    let found =
        call(|err| unsafe { sys::tamp_overlapping(array, count, &mut one, &mut other, err) })?;
    Ok((found != 0).then_some((one, other)))
}

/// Returns the number of elements of a tensor of this shape. The sizes of an empty tensor may be so large that a
/// product of some of them overflows, as in tch's `numel`.
pub(crate) fn elements(sizes: &[i64]) -> usize {
    if sizes.contains(&0) {
        return 0;
    }
    sizes.iter().map(|&size| usize::try_from(size).unwrap_or(0)).fold(1, usize::saturating_mul)
}

/// Returns the number of elements of a tensor; 0 if it has no shape.
pub(crate) fn numel(tensor: &Tensor) -> usize {
    sizes(tensor).map_or(0, |sizes| elements(&sizes))
}

/// The identity of the memory that parameters had at some time, and how often it had been written to. While a stamp is
/// alive, no other memory gets the same identity.
#[derive(Debug, Default)]
pub(crate) struct Stamps(Vec<sys::Stamp>);

impl Stamps {
    /// Returns for each parameter whether it has changed since its stamp was taken. A parameter without a stamp counts
    /// as changed.
    pub(crate) fn compare(&mut self, parameters: &[Tensor]) -> Result<Vec<bool>> {
        let tensors = pointers(parameters);
        self.0.resize_with(self.0.len().max(tensors.len()), sys::Stamp::default);
        let mut changed = vec![0u8; tensors.len()];
        let (array, count, out) = (tensors.as_ptr(), tensors.len(), changed.as_mut_ptr());
        // SAFETY: all arrays have `count` elements, and the borrow keeps the tensors alive.
        call(|err| unsafe {
            sys::tamp_stamps_compare(array, count, self.0.as_ptr(), out, err);
        })?;
        Ok(changed.into_iter().map(|changed| changed != 0).collect())
    }

    /// Returns whether one of the parameters has other memory than when its stamp was taken, whatever was written to
    /// it.
    pub(crate) fn have_moved(&mut self, parameters: &[Tensor]) -> Result<bool> {
        let tensors = pointers(parameters);
        self.0.resize_with(self.0.len().max(tensors.len()), sys::Stamp::default);
        let (array, count, stamps) = (tensors.as_ptr(), tensors.len(), self.0.as_ptr());
        // SAFETY: both arrays have `count` elements, and the borrow keeps the tensors alive.
        let moved = call(|err| unsafe { sys::tamp_stamps_have_moved(array, count, stamps, err) })?;
        Ok(moved != 0)
    }

    /// Takes new stamps of the parameters.
    pub(crate) fn take(&mut self, parameters: &[Tensor]) -> Result<()> {
        let tensors = pointers(parameters);
        self.0.resize_with(self.0.len().max(tensors.len()), sys::Stamp::default);
        let (array, count, stamps) = (tensors.as_ptr(), tensors.len(), self.0.as_mut_ptr());
        // SAFETY: both arrays have `count` elements, and the borrow keeps the tensors alive.
        call(|err| unsafe { sys::tamp_stamps_take(array, count, stamps, err) })
    }

    /// Returns the stamps of the first `count` parameters.
    pub(super) fn of_each(&mut self, count: usize) -> impl Iterator<Item = *mut sys::Stamp> {
        self.0.resize_with(self.0.len().max(count), sys::Stamp::default);
        self.0.iter_mut().map(std::ptr::from_mut)
    }

    /// Takes a new stamp of one parameter.
    pub(crate) fn take_one(&mut self, index: usize, parameter: &Tensor) -> Result<()> {
        let needed = self.0.len().max(index + 1);
        self.0.resize_with(needed, sys::Stamp::default);
        let tensor = [pointer(parameter)];
        let stamp: *mut sys::Stamp = &mut self.0[index];
        // SAFETY: the array has one element, `stamp` is valid for a write, and the borrow keeps the tensor alive.
        call(|err| unsafe { sys::tamp_stamps_take(tensor.as_ptr(), 1, stamp, err) })
    }

    /// Returns whether the parameter has a stamp.
    pub(crate) fn has(&self, index: usize) -> bool {
        self.0.get(index).is_some_and(|stamp| stamp.memory != 0)
    }

    pub(crate) fn forget(&mut self, index: usize) {
        if let Some(stamp) = self.0.get_mut(index) {
            release(stamp);
        }
    }
}

impl Drop for Stamps {
    fn drop(&mut self) {
        self.0.iter_mut().for_each(release);
    }
}

fn release(stamp: &mut sys::Stamp) {
    let memory = std::mem::take(stamp).memory;
    // SAFETY: only the shim writes it, which has taken hold of the memory, and the stamp no longer refers to it.
    unsafe { sys::tamp_memory_release(memory) }
}

/// A weak reference to a tensor, which keeps neither the tensor nor its memory.
#[derive(Debug)]
pub(crate) struct Watched(usize);

impl Watched {
    /// Refers to a defined tensor.
    pub(crate) fn new(tensor: &Tensor) -> Self {
        // SAFETY: `tensor` is a live tensor.
        Self(unsafe { sys::tamp_tensor_watch(tensor.as_ptr()) })
    }

    /// The tensor, or an undefined one if nothing else holds it any more.
    pub(crate) fn get(&self) -> Result<Tensor> {
        // SAFETY: the reference is released only when it is dropped.
        let tensor = call(|err| unsafe { sys::tamp_tensor_watched(self.0, err) })?;
        if tensor.is_null() { Ok(Tensor::new()) } else { given(tensor) }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        // SAFETY: `new` has taken the reference, which is released only here.
        unsafe { sys::tamp_memory_release(self.0) }
    }
}

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

/// Copies the bytes of a contiguous tensor's elements, from the element `first` on. Synchronizes.
pub(crate) fn elements_read(from: &Tensor, first: i64, to: &mut [u8]) -> Result<()> {
    let (memory, len) = (to.as_mut_ptr(), to.len());
    // SAFETY: `from` is a live tensor, `to` is valid for `len` writes, and the shim stays within both.
    call(|err| unsafe { sys::tamp_elements_read(from.as_ptr(), first, memory, len, err) })
}

/// Gives `fill` the memory of a contiguous tensor on the CPU, given the bytes of its first element. These are written
/// through libtorch before, which refuses a tensor without memory of its own, and counts the change.
pub(crate) fn elements_fill<R>(
    to: &mut Tensor,
    first: &[u8],
    fill: impl FnOnce(&mut [u8]) -> R,
) -> Result<R> {
    elements_write(to, 0, first)?;
    let len = to.numel().saturating_mul(to.f_kind()?.elt_size_in_bytes());
    let memory = to.data_ptr().cast::<u8>();
    if memory.is_null() || to.device() != Device::Cpu {
        return Err(Error::Torch("the tensor has no memory on the CPU".to_owned()));
    }
    // SAFETY: libtorch has just written to it as to a contiguous tensor, so that it has `len` bytes from its data
    // pointer on, and it is on the CPU. libtorch's allocator has made them, so that Rust assumes nothing about their
    // content. `to` keeps them alive, no other Rust reference to them exists, since tch hands out none, and libtorch
    // uses them only in calls, of which `fill` makes none.
    Ok(fill(unsafe { std::slice::from_raw_parts_mut(memory, len) }))
}

/// Overwrites a contiguous tensor's elements, from the element `first` on. Synchronizes.
pub(crate) fn elements_write(to: &mut Tensor, first: i64, from: &[u8]) -> Result<()> {
    let (memory, len) = (from.as_ptr(), from.len());
    // SAFETY: `to` is a live tensor, `from` is valid for `len` reads, and the shim stays within both and keeps neither.
    call(|err| unsafe { sys::tamp_elements_write(pointer(to), first, memory, len, err) })
}

/// Returns the state of a device's default random number generator, which libtorch keeps on the host.
pub(crate) fn rng_state(device: Device) -> Result<Tensor> {
    let (device_type, index) = place(device)?;
    // SAFETY: takes two numbers, and `err` is valid for a write.
    given(call(|err| unsafe { sys::tamp_rng_state(device_type, index, err) })?)
}

/// Sets the state of a device's default random number generator.
pub(crate) fn rng_set_state(device: Device, state: &Tensor) -> Result<()> {
    let (device_type, index) = place(device)?;
    // SAFETY: `state` is a live tensor, and `err` is valid for a write.
    call(|err| unsafe { sys::tamp_rng_set_state(device_type, index, state.as_ptr(), err) })
}

/// Returns an error unless a device's default random number generator accepts a state. The generator stays as it is.
pub(crate) fn rng_check_state(device: Device, state: &Tensor) -> Result<()> {
    let (device_type, index) = place(device)?;
    // SAFETY: `state` is a live tensor, and `err` is valid for a write.
    call(|err| unsafe { sys::tamp_rng_check_state(device_type, index, state.as_ptr(), err) })
}

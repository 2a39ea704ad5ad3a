//! Tensors of one number. tch's functions that take a number panic if libtorch fails; these return errors.

use tch::{Device, Kind, Tensor};

use super::dtype_code;
use super::{OutsideRegions, call, given, place, pointer, pointers};
use crate::error::{Error, Result};
use crate::sys;

/// The number of `c10::ScalarType` for i32.
const INT: i8 = 3;

/// A count of the host, with which from some step on only a device goes on.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Counted<T, D = Tensor> {
    Host(T),
    /// Its numbers as f64.
    Device(D),
}

impl<T> Counted<T> {
    pub(crate) fn tensor(&self) -> Option<&Tensor> {
        match self {
            Self::Host(_) => None,
            Self::Device(count) => Some(count),
        }
    }

    /// What the host's count says of something, or the device's count.
    pub(crate) fn map<U>(&self, of: impl FnOnce(&T) -> U) -> Counted<U, &Tensor> {
        match self {
            Self::Host(count) => Counted::Host(of(count)),
            Self::Device(count) => Counted::Device(count),
        }
    }
}

/// Creates a tensor without dimensions that holds a value.
pub(crate) fn number_new(value: f64, kind: Kind, device: Device) -> Result<Tensor> {
    let dtype = match kind {
        Kind::Int => INT,
        _ => dtype_code(kind).ok_or_else(|| Error::Torch(format!("no number is {kind:?}")))?,
    };
    let (device_type, index) = place(device)?;
    // SAFETY: takes numbers, and `err` is valid for a write.
    given(call(|err| unsafe { sys::tamp_number_new(value, dtype, device_type, index, err) })?)
}

/// Writes a value to a tensor. Does not synchronize.
pub(crate) fn number_set(number: &Tensor, value: f64) -> Result<()> {
    // SAFETY: `number` is a live tensor, which is changed in place through libtorch's own handle, which aliases freely.
    call(|err| unsafe { sys::tamp_number_set(pointer(number), value, err) })
}

/// Lowers the number in a tensor to `most` if it is larger. Does not synchronize.
pub(crate) fn number_limit(number: &Tensor, most: f64) -> Result<()> {
    // SAFETY: as in `number_set`.
    call(|err| unsafe { sys::tamp_number_limit(pointer(number), most, err) })
}

/// Returns the elements of real tensors on one device, one tensor after the other. Synchronizes once.
pub(crate) fn numbers_read(numbers: &[&Tensor]) -> Result<Vec<f64>> {
    let mut values = vec![0.0; numbers.iter().map(|number| super::numel(number)).sum()];
    let tensors = pointers(numbers.iter().copied());
    let (array, count) = (tensors.as_ptr(), tensors.len());
    let (out, len) = (values.as_mut_ptr(), values.len());
    // SAFETY: the array has `count` elements, the borrows keep the tensors alive, and `values` is valid for `len`
    // writes, which the shim checks against the number of elements.
    call(|err| unsafe { sys::tamp_numbers_read(array, count, out, len, err) })?;
    Ok(values)
}

/// Returns a number on another device. Does not synchronize if that is a CUDA device; on the host, a copy in flight
/// could be read too early.
pub(crate) fn number_on(number: &Tensor, device: Device, kind: Kind) -> Result<Tensor> {
    let _own = OutsideRegions::enter();
    // Other devices may read the number's own memory later.
    let non_blocking = matches!(device, Device::Cuda(_));
    Ok(number.f_to_device_(device, kind, non_blocking, false)?)
}

//! The dtypes that policies cast to, their names, and the cast.

use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::ffi::OutsideRegions;
use crate::tree::{Tree, floating_kind};

/// The dtypes and their names. The first name of each is the one that is printed.
const NAMES: [(Kind, &[&str]); 4] = [
    (Kind::Float, &["float32", "f32", "fp32", "float", "full"]),
    (Kind::Half, &["float16", "f16", "fp16"]),
    (Kind::BFloat16, &["bfloat16", "bf16"]),
    (Kind::Double, &["float64", "f64", "fp64", "double"]),
];

/// Lists [`NAMES`] for a message.
pub(super) fn allowed() -> String {
    let one = |names: &[&str]| format!("{} ({})", names[0], names[1..].join(", "));
    let all: Vec<_> = NAMES.iter().map(|(_, names)| one(names)).collect();
    format!("{} and half", all.join(", "))
}

/// Returns the name that a dtype is printed under; `None` for one that no policy can have.
pub(super) fn name(kind: Kind) -> Option<&'static str> {
    NAMES.iter().find(|(known, _)| *known == kind).and_then(|(_, names)| names.first().copied())
}

/// Returns the dtype with a name, in lower case, on a device.
pub(super) fn named(name: &str, device: Device) -> Option<Kind> {
    if name == "half" {
        return Some(half_dtype(device));
    }
    NAMES.iter().find(|(_, names)| names.contains(&name)).map(|(kind, _)| *kind)
}

/// Returns the half-precision dtype of a device: fp16 on CUDA and MPS, and bf16 on the CPU, where fp16 is slow. It is
/// also the default dtype of autocast regions there. Corresponds to `jmp.half_dtype()`, which is bf16 on TPUs and fp16
/// elsewhere.
pub fn half_dtype(device: Device) -> Kind {
    match device {
        Device::Cpu => Kind::BFloat16,
        Device::Cuda(_) | Device::Mps | Device::Vulkan => Kind::Half,
    }
}

/// Casts the floating-point tensors of a tree to f32, with the rules of
/// [`Policy::cast_to_param`](crate::Policy::cast_to_param). Corresponds to `jmp.cast_to_full`.
///
/// # Errors
///
/// [`Error::Torch`](crate::Error::Torch) if a cast fails.
///
/// # Examples
///
/// ```
/// use tch::{Kind, Tensor};
/// use tch_amp::policy::cast_to_full;
///
/// let batch = (Tensor::from(0.5f32).to_kind(Kind::BFloat16), Tensor::from(3i64));
/// let (image, label) = cast_to_full(&batch)?;
/// assert_eq!((image.kind(), label.kind()), (Kind::Float, Kind::Int64));
/// # Ok::<(), tch_amp::Error>(())
/// ```
pub fn cast_to_full<T: Tree + ?Sized>(tree: &T) -> Result<T::Output> {
    tree.try_map(&mut |tensor| cast(tensor, Kind::Float))
}

/// Casts each floating-point tensor of a tree to the [`half_dtype`] of its device, with the rules of
/// [`Policy::cast_to_param`](crate::Policy::cast_to_param). Corresponds to `jmp.cast_to_half`.
///
/// # Errors
///
/// [`Error::Torch`](crate::Error::Torch) if a cast fails.
pub fn cast_to_half<T: Tree + ?Sized>(tree: &T) -> Result<T::Output> {
    tree.try_map(&mut |tensor| match floating_kind(tensor) {
        Some(_) => cast(tensor, half_dtype(tensor.device())),
        None => Ok(tensor.shallow_clone()),
    })
}

/// Casts a floating-point tensor to `kind`; returns others as they are.
pub(super) fn cast(tensor: &Tensor, kind: Kind) -> Result<Tensor> {
    let _own = OutsideRegions::enter();
    match floating_kind(tensor) {
        Some(from) if from != kind => Ok(tensor.f_to_kind(kind)?),
        _ => Ok(tensor.shallow_clone()),
    }
}

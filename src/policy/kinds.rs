//! The kinds that policies cast to, their names, and the cast.

use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::tree::{Tree, floating_kind};

/// The kinds and their names, the one that is printed first.
const NAMES: [(Kind, &[&str]); 4] = [
    (Kind::Float, &["float32", "f32", "fp32", "float", "full"]),
    (Kind::Half, &["float16", "f16", "fp16"]),
    (Kind::BFloat16, &["bfloat16", "bf16"]),
    (Kind::Double, &["float64", "f64", "fp64", "double"]),
];

/// What a message says about [`NAMES`].
pub(super) fn allowed() -> String {
    let one = |names: &[&str]| format!("{} ({})", names[0], names[1..].join(", "));
    let all: Vec<_> = NAMES.iter().map(|(_, names)| one(names)).collect();
    format!("{} and half", all.join(", "))
}

/// The name that a kind is printed under; `None` for one that no policy has.
pub(super) fn name(kind: Kind) -> Option<&'static str> {
    NAMES.iter().find(|(known, _)| *known == kind).and_then(|(_, names)| names.first().copied())
}

/// The kind with a name, in small letters, on a device.
pub(super) fn named(name: &str, device: Device) -> Option<Kind> {
    if name == "half" {
        return Some(half_dtype(device));
    }
    NAMES.iter().find(|(_, names)| names.contains(&name)).map(|(kind, _)| *kind)
}

/// Returns the right half kind for a device: fp16 on CUDA and MPS, and bf16 on the CPU, where fp16 is slow. It is the
/// dtype of autocast regions there, too. As `jmp.half_dtype()`, which is bf16 on TPUs and fp16 elsewhere.
pub fn half_dtype(device: Device) -> Kind {
    match device {
        Device::Cpu => Kind::BFloat16,
        Device::Cuda(_) | Device::Mps | Device::Vulkan => Kind::Half,
    }
}

/// Casts the floating tensors of a tree to f32, as [`Policy::cast_to_param`](crate::Policy::cast_to_param) casts. As
/// `jmp.cast_to_full`.
///
/// # Errors
///
/// [`Error::Torch`](crate::Error::Torch) when a cast fails.
pub fn cast_to_full<T: Tree + ?Sized>(tree: &T) -> Result<T::Output> {
    tree.try_map(&mut |tensor| cast(tensor, Kind::Float))
}

/// Casts each floating tensor of a tree to the right half kind for its device (see [`half_dtype`]), as
/// [`Policy::cast_to_param`](crate::Policy::cast_to_param) casts. As `jmp.cast_to_half`.
///
/// # Errors
///
/// [`Error::Torch`](crate::Error::Torch) when a cast fails.
pub fn cast_to_half<T: Tree + ?Sized>(tree: &T) -> Result<T::Output> {
    tree.try_map(&mut |tensor| match floating_kind(tensor) {
        Some(_) => cast(tensor, half_dtype(tensor.device())),
        None => Ok(tensor.shallow_clone()),
    })
}

/// The tensor in another floating kind, if it has one.
pub(super) fn cast(tensor: &Tensor, kind: Kind) -> Result<Tensor> {
    match floating_kind(tensor) {
        Some(from) if from != kind => Ok(tensor.f_to_kind(kind)?),
        _ => Ok(tensor.shallow_clone()),
    }
}

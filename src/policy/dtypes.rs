//! The type [`Policy`], the dtypes that it casts to, and the casts.

use tch::{Device, Kind, Tensor};

use crate::error::{Error, PolicyError, Result};
use crate::ffi::OutsideRegions;
use crate::tree::{Tree, floating_kind};

/// The dtypes and their names. The first name of each is the one that is printed.
const NAMES: [(Kind, &[&str]); 4] = [
    (Kind::Float, &["float32", "f32", "fp32", "float", "full"]),
    (Kind::Half, &["float16", "f16", "fp16"]),
    (Kind::BFloat16, &["bfloat16", "bf16"]),
    (Kind::Double, &["float64", "f64", "fp64", "double"]),
];

/// The dtypes of a model's parameters, of its computation, and of its outputs. The counterpart of `jmp.Policy`.
///
/// # Examples
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use tch_amp::Policy;
///
/// let policy: Policy = "p=f32,c=bf16,o=f32".parse()?;
/// assert_eq!(policy, Policy::MIXED_BF16);
/// assert_eq!(policy.to_string(), "params=float32,compute=bfloat16,output=float32");
///
/// let (image, label) = (Tensor::from(0.5f32), Tensor::from(3i64));
/// let (image, label) = policy.cast_to_compute(&(image, label))?;
/// assert_eq!((image.kind(), label.kind()), (Kind::BFloat16, Kind::Int64));
///
/// let policy = Policy { output: Kind::Float, ..Policy::BF16 };
/// assert_eq!(policy.to_string(), "params=bfloat16,compute=bfloat16,output=float32");
/// # Ok::<(), tch_amp::Error>(())
/// ```
///
/// The dtypes can be f32, fp16, bf16 and f64; [`PolicyError::Dtype`] refuses any other where the policy is used.
///
/// # As text
///
/// A policy is parsed from one of these:
///
/// - assignments to `params` (or `p`), `compute` (`c`) and `output` (`o`), separated by commas. As in jmp, `params`
///   defaults to `float32`, `compute` to `params`, and `output` to `compute`;
/// - one dtype, which all three get;
/// - the name of an [`OptLevel`](crate::policy::OptLevel), `O0` to `O3`.
///
/// The dtypes are `float32` (or `f32`, `fp32`, `float`, `full`), `float16` (`f16`, `fp16`), `bfloat16` (`bf16`),
/// `float64` (`f64`, `fp64`, `double`) and `half`, the [`half_dtype`](crate::policy::half_dtype) of a device. Case and
/// spaces around names do not matter. [`parse`](Self::parse) takes the device as an argument; [`str::parse`] uses
/// [`Device::cuda_if_available`](tch::Device::cuda_if_available), as jmp uses JAX's default device.
///
/// The text form of a policy, which is also its serialized form, has the long names and the dtypes that `half` and `O1`
/// stood for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Policy {
    /// The dtype of the parameters.
    pub param: Kind,
    /// The dtype of the inputs and of the computation.
    pub compute: Kind,
    /// The dtype of the outputs.
    pub output: Kind,
}

impl Policy {
    /// Everything in f32: `"full"`.
    pub const FULL: Self = Self::all(Kind::Float);
    /// Everything in f64.
    pub const DOUBLE: Self = Self::all(Kind::Double);
    /// Everything in fp16.
    pub const F16: Self = Self::all(Kind::Half);
    /// Everything in bf16.
    pub const BF16: Self = Self::all(Kind::BFloat16);
    /// Parameters and outputs in f32, computation in fp16.
    pub const MIXED_F16: Self = Self { compute: Kind::Half, ..Self::FULL };
    /// Parameters and outputs in f32, computation in bf16.
    pub const MIXED_BF16: Self = Self { compute: Kind::BFloat16, ..Self::FULL };

    pub(super) const fn all(kind: Kind) -> Self {
        Self { param: kind, compute: kind, output: kind }
    }

    /// Casts the floating-point tensors of a tree to the dtype of the parameters. Corresponds to `cast_to_param` in
    /// jmp.
    ///
    /// Other tensors (integer, boolean, complex, quantized and undefined ones) and tensors that already have the dtype
    /// are returned as new handles of the same memory. Gradients flow through the casts.
    ///
    /// To cast the variables of a `VarStore` in place, use [`cast_variables`](Self::cast_variables).
    ///
    /// # Errors
    ///
    /// [`PolicyError::Dtype`] if the field was set to a dtype other than f32, fp16, bf16 and f64; [`Error::Torch`] if a
    /// cast fails, for instance because memory runs out.
    pub fn cast_to_param<T: Tree + ?Sized>(&self, tree: &T) -> Result<T::Output> {
        cast_tree(tree, "param", self.param)
    }

    /// Casts the floating-point tensors of a tree to the dtype of the computation, with the rules of
    /// [`cast_to_param`](Self::cast_to_param). Corresponds to `cast_to_compute` in jmp.
    ///
    /// # Errors
    ///
    /// The same as [`cast_to_param`](Self::cast_to_param).
    pub fn cast_to_compute<T: Tree + ?Sized>(&self, tree: &T) -> Result<T::Output> {
        cast_tree(tree, "compute", self.compute)
    }

    /// Casts the floating-point tensors of a tree to the dtype of the outputs, with the rules of
    /// [`cast_to_param`](Self::cast_to_param). Corresponds to `cast_to_output` in jmp.
    ///
    /// # Errors
    ///
    /// The same as [`cast_to_param`](Self::cast_to_param).
    pub fn cast_to_output<T: Tree + ?Sized>(&self, tree: &T) -> Result<T::Output> {
        cast_tree(tree, "output", self.output)
    }

    /// Returns the policy, or an error if one of its public fields was set to a dtype that it cannot cast to.
    pub(super) fn checked(self) -> Result<Self> {
        check("param", self.param)?;
        check("compute", self.compute)?;
        check("output", self.output)?;
        Ok(self)
    }
}

impl Default for Policy {
    /// Everything in f32.
    fn default() -> Self {
        Self::FULL
    }
}

pub(super) fn check(field: &'static str, kind: Kind) -> Result<()> {
    name(kind).map(|_| ()).ok_or(Error::Policy(PolicyError::Dtype { field, kind }))
}

fn cast_tree<T: Tree + ?Sized>(tree: &T, field: &'static str, kind: Kind) -> Result<T::Output> {
    check(field, kind)?;
    tree.try_map(&mut |tensor: &Tensor| cast(tensor, kind))
}

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

/// Casts a floating-point tensor to `kind`; returns others as they are.
pub(super) fn cast(tensor: &Tensor, kind: Kind) -> Result<Tensor> {
    let _own = OutsideRegions::enter();
    match floating_kind(tensor) {
        Some(from) if from != kind => Ok(tensor.f_to_kind(kind)?),
        _ => Ok(tensor.shallow_clone()),
    }
}

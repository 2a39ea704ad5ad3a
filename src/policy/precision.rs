//! The policy itself.

use tch::{Kind, Tensor};

use crate::error::{Error, PolicyError, Result};
use crate::policy::kinds::{cast, name};
use crate::tree::Tree;

/// The kinds of parameters, computation and outputs. The twin of `jmp.Policy`.
///
/// ```
/// use tch::{Kind, Tensor};
/// use tch_amp::Policy;
///
/// let policy: Policy = "p=f32,c=bf16,o=f32".parse()?;
/// assert_eq!(policy, Policy::MIXED_BF16);
/// assert_eq!(policy.to_string(), "params=float32,compute=bfloat16,output=float32");
///
/// let (image, label) = (Tensor::from(0.5f32), Tensor::from(3i64));
/// let (image, label) = policy.cast_to_compute(&(image, label))?;
/// assert_eq!((image.kind(), label.kind()), (Kind::BFloat16, Kind::Int64));
/// # Ok::<(), tch_amp::Error>(())
/// ```
///
/// # As text
///
/// A policy is read from
///
/// - assignments to `params` (or `p`), `compute` (`c`) and `output` (`o`), separated by commas: params default to
///   `float32`, compute to params and output to compute, as in jmp;
/// - one kind, which is that of all three;
/// - the name of an [`OptLevel`](crate::policy::OptLevel), `O0` to `O3`.
///
/// Kinds are `float32` (or `f32`, `fp32`, `float`, `full`), `float16` (`f16`, `fp16`), `bfloat16` (`bf16`), `float64`
/// (`f64`, `fp64`, `double`) and `half`, which is the right half kind for a device (see [`half_dtype`](crate::policy::half_dtype)). Capitals and
/// spaces do not matter. [`parse`](Self::parse) takes the device; [`str::parse`] takes CUDA where it is available and
/// else the CPU, as [`Device::cuda_if_available`](tch::Device::cuda_if_available) does and jmp with JAX's default
/// device.
///
/// It prints in the long form, with the kinds that `half` and `O1` stood for, and is serialised as that text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Policy {
    /// The kind that parameters are kept and updated in.
    pub param: Kind,
    /// The kind of inputs and of the computation.
    pub compute: Kind,
    /// The kind of outputs.
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

    /// Makes a policy of three kinds.
    ///
    /// # Errors
    ///
    /// [`PolicyError::Dtype`] for a kind that is not one of f32, fp16, bf16 and f64.
    pub fn new(param: Kind, compute: Kind, output: Kind) -> Result<Self> {
        Self { param, compute, output }.checked()
    }

    /// Returns the same policy with another kind of parameters.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn with_param(self, param: Kind) -> Result<Self> {
        Self { param, ..self }.checked()
    }

    /// Returns the same policy with another kind to compute in.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn with_compute(self, compute: Kind) -> Result<Self> {
        Self { compute, ..self }.checked()
    }

    /// Returns the same policy with another kind of outputs. As `with_output_dtype` in jmp.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn with_output(self, output: Kind) -> Result<Self> {
        Self { output, ..self }.checked()
    }

    /// Casts the floating tensors of a tree to the kind of parameters. As jmp's method of that name.
    ///
    /// Other tensors (integers, booleans, complex, quantized and undefined ones) and those that have the kind already
    /// come back as they are, as new handles of the same memory. Autograd goes through the casts.
    ///
    /// The variables of a `VarStore` are cast in place, by [`cast_variables`](Self::cast_variables).
    ///
    /// # Errors
    ///
    /// [`PolicyError::Dtype`] when the field was set to another kind than f32, fp16, bf16 and f64; [`Error::Torch`] when
    /// a cast fails for want of memory, say.
    pub fn cast_to_param<T: Tree + ?Sized>(&self, tree: &T) -> Result<T::Output> {
        cast_tree(tree, "param", self.param)
    }

    /// Casts the floating tensors of a tree to the kind to compute in, as [`cast_to_param`](Self::cast_to_param) does
    /// to that of parameters. As jmp's method of that name.
    ///
    /// # Errors
    ///
    /// As [`cast_to_param`](Self::cast_to_param).
    pub fn cast_to_compute<T: Tree + ?Sized>(&self, tree: &T) -> Result<T::Output> {
        cast_tree(tree, "compute", self.compute)
    }

    /// Casts the floating tensors of a tree to the kind of outputs, as [`cast_to_param`](Self::cast_to_param) does to
    /// that of parameters. As jmp's method of that name.
    ///
    /// # Errors
    ///
    /// As [`cast_to_param`](Self::cast_to_param).
    pub fn cast_to_output<T: Tree + ?Sized>(&self, tree: &T) -> Result<T::Output> {
        cast_tree(tree, "output", self.output)
    }

    /// The policy, unless a field is no kind to cast to: the fields are public.
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

//! Conversions between fp16 and bf16 tensors and the numbers of the crate [`half`](https://docs.rs/half).
//!
//! In tch up to 0.26, `Tensor::from_slice` and `Vec::try_from` treat `half::bf16` as fp16: the tensor gets
//! `Kind::Half`, and so its numbers are wrong. The functions here are the counterparts of those two and handle both
//! types correctly.
//!
//! ```
//! use tch::{Kind, Tensor};
//! use tch_amp::half::bf16;
//!
//! let numbers = [0.5, -3.0, 1e30].map(bf16::from_f32);
//! let tensor = tch_amp::half::from_slice(&numbers)?.view([3, 1]);
//! assert_eq!(tensor.kind(), Kind::BFloat16);
//! assert_eq!(tch_amp::half::to_vec::<bf16>(&tensor)?, numbers);
//! # Ok::<(), tch_amp::Error>(())
//! ```

/// The numbers of the crate `half`, in the version that this crate uses.
pub use ::half::{bf16, f16};
use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result, ensure_defined};
use crate::ffi::OutsideRegions;

/// A half-precision number: `half::f16` or `half::bf16`.
pub trait HalfElement: Copy + sealed::Bits {
    /// The dtype of tensors of such numbers.
    const KIND: Kind;
}

impl HalfElement for ::half::f16 {
    const KIND: Kind = Kind::Half;
}

impl HalfElement for ::half::bf16 {
    const KIND: Kind = Kind::BFloat16;
}

/// Creates a one-dimensional tensor on the CPU, like `Tensor::from_slice` does for other types.
///
/// # Errors
///
/// [`Error::Torch`] if the tensor cannot be allocated.
pub fn from_slice<T: HalfElement>(numbers: &[T]) -> Result<Tensor> {
    // tch handles `i16` correctly, so the bits are passed as such.
    let bits: Vec<i16> = numbers.iter().map(|number| number.to_bits()).collect();
    Ok(Tensor::f_from_slice(&bits)?.f_view_dtype(T::KIND)?)
}

/// Returns the numbers of a tensor of any shape, in row-major order. Synchronizes if the tensor is on a GPU. Unlike
/// `Vec::try_from` for other types, it does not convert other dtypes, because that would hide which of the two dtypes a
/// tensor has.
///
/// # Errors
///
/// [`Error::InvalidArgument`] for a tensor of another dtype or an undefined one, and [`Error::Torch`] for a tensor that
/// is not dense.
///
/// # Examples
///
/// ```
/// use half::{bf16, f16};
/// use tch::{Kind, Tensor};
/// use tch_amp::half::to_vec;
///
/// let tensor = Tensor::from_slice(&[0.5f32, 2.0]).to_kind(Kind::Half);
/// assert_eq!(to_vec::<f16>(&tensor)?, [f16::from_f32(0.5), f16::from_f32(2.0)]);
/// let other = to_vec::<bf16>(&tensor).map_err(|error| error.to_string());
/// assert!(other.is_err_and(|error| error.ends_with("convert it with to_kind(BFloat16)")));
/// # Ok::<(), tch_amp::Error>(())
/// ```
pub fn to_vec<T: HalfElement>(tensor: &Tensor) -> Result<Vec<T>> {
    let _own = OutsideRegions::enter();
    ensure_defined("the tensor", tensor)?;
    let found = tensor.f_kind()?;
    if found != T::KIND {
        let expected = T::KIND;
        let problem = format!(
            "is {found:?}, but must be {expected:?}; convert it with to_kind({expected:?})"
        );
        return Err(Error::InvalidArgument { name: "the tensor", problem });
    }
    let plain = tensor.f_detach()?.f_to_device(Device::Cpu)?.f_resolve_neg()?.f_contiguous()?;
    let bits = Vec::<i16>::try_from(plain.f_view_dtype(Kind::Int16)?.f_view([-1])?)?;
    Ok(bits.into_iter().map(T::from_bits).collect())
}

/// Converts numbers to and from their bits. Sealed, because a tensor has no other 16-bit floating dtypes.
mod sealed {
    pub trait Bits {
        fn to_bits(self) -> i16;
        fn from_bits(bits: i16) -> Self;
    }

    macro_rules! bits {
        ($($number:ty),+) => {
            $(impl Bits for $number {
                fn to_bits(self) -> i16 {
                    <$number>::to_bits(self).cast_signed()
                }

                fn from_bits(bits: i16) -> Self {
                    <$number>::from_bits(bits.cast_unsigned())
                }
            })+
        };
    }

    bits!(::half::f16, ::half::bf16);
}

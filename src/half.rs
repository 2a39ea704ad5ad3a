//! Tensors of fp16 and bf16 from numbers of the crate [`half`](https://docs.rs/half), and back.
//!
//! In tch up to 0.26 `Tensor::from_slice` and `Vec::try_from` take `half::bf16` for fp16: the tensor has
//! `Kind::Half`, and its numbers are others. These functions do for both types what those do for the rest.
//!
//! ```
//! use half::bf16;
//! use tch::{Kind, Tensor};
//!
//! let numbers = [0.5, -3.0, 1e30].map(bf16::from_f32);
//! let tensor = tch_amp::half::from_slice(&numbers)?.view([3, 1]);
//! assert_eq!(tensor.kind(), Kind::BFloat16);
//! assert_eq!(tch_amp::half::to_vec::<bf16>(&tensor)?, numbers);
//! # Ok::<(), tch_amp::Error>(())
//! ```

use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};

/// A number of 16 bits: `half::f16` or `half::bf16`.
pub trait HalfElement: Copy + sealed::Bits {
    /// The dtype of its tensors.
    const KIND: Kind;
}

impl HalfElement for ::half::f16 {
    const KIND: Kind = Kind::Half;
}

impl HalfElement for ::half::bf16 {
    const KIND: Kind = Kind::BFloat16;
}

/// Makes a tensor of one dimension on the CPU. As `Tensor::from_slice` for the other types.
///
/// # Errors
///
/// [`Error::Torch`] if there is no memory for it.
pub fn from_slice<T: HalfElement>(numbers: &[T]) -> Result<Tensor> {
    // tch takes these 16 bits for what they are.
    let bits: Vec<i16> = numbers.iter().map(|number| number.to_bits()).collect();
    Ok(Tensor::f_from_slice(&bits)?.f_view_dtype(T::KIND)?)
}

/// Returns the numbers of a tensor of any shape, in row-major order. Waits for the device. As `Vec::try_from` for the
/// other types, which converts other dtypes; here that would hide which of the two a tensor is.
///
/// # Errors
///
/// [`Error::InvalidArgument`] for a tensor of another dtype, and [`Error::Torch`] for one that is not dense.
pub fn to_vec<T: HalfElement>(tensor: &Tensor) -> Result<Vec<T>> {
    let found = tensor.f_kind()?;
    if found != T::KIND {
        let expected = T::KIND;
        let problem = format!(
            "is {found:?}, and these numbers are {expected:?}; convert it with to_kind({expected:?})"
        );
        return Err(Error::InvalidArgument { name: "the tensor", problem });
    }
    let plain = tensor.f_detach()?.f_to_device(Device::Cpu)?.f_resolve_neg()?.f_contiguous()?;
    let bits = Vec::<i16>::try_from(plain.f_view_dtype(Kind::Int16)?.f_view([-1])?)?;
    Ok(bits.into_iter().map(T::from_bits).collect())
}

/// The numbers as their bits. No other crate's types have 16 of them in a tensor.
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

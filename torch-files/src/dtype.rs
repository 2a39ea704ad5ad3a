//! The dtypes of tensors in files: the one table of their names and sizes.

use std::fmt;

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// The dtype of a tensor, with PyTorch's names. Elements are little-endian in every file that this crate reads or
/// writes.
///
/// # Examples
///
/// ```
/// use torch_files::Dtype;
///
/// assert_eq!(Dtype::BFloat16.size(), 2);
/// assert_eq!(Dtype::BFloat16.to_string(), "bfloat16");
/// assert_eq!(Dtype::of::<half::bf16>(), Dtype::BFloat16);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Dtype {
    /// One byte, 0 or 1.
    Bool,
    /// Unsigned, 8 bits.
    Uint8,
    /// Unsigned, 16 bits.
    Uint16,
    /// Unsigned, 32 bits.
    Uint32,
    /// Unsigned, 64 bits.
    Uint64,
    /// Signed, 8 bits.
    Int8,
    /// Signed, 16 bits.
    Int16,
    /// Signed, 32 bits.
    Int32,
    /// Signed, 64 bits.
    Int64,
    /// IEEE half precision, `f16` of `half`.
    Float16,
    /// bfloat16, `bf16` of `half`.
    BFloat16,
    /// IEEE single precision.
    Float32,
    /// IEEE double precision.
    Float64,
    /// Two `Float16`: the real and the imaginary part.
    Complex32,
    /// Two `Float32`.
    Complex64,
    /// Two `Float64`.
    Complex128,
    /// 8 bits with 5 of exponent.
    Float8E5m2,
    /// 8 bits with 4 of exponent, without infinities.
    Float8E4m3fn,
    /// 8 bits with 5 of exponent, with one zero.
    Float8E5m2fnuz,
    /// 8 bits with 4 of exponent, without infinities and with one zero.
    Float8E4m3fnuz,
}

/// A row of the table.
struct Row {
    dtype: Dtype,
    size: usize,
    /// The name in Python, without `torch.`.
    name: &'static str,
    /// The class of its storages in a pickle. Newer dtypes have none in Python.
    storage: Option<&'static str>,
    /// The name of such a class in TorchScript, where Python has none.
    script_storage: Option<&'static str>,
    safetensors: Option<&'static str>,
}

const fn row(
    dtype: Dtype,
    size: usize,
    name: &'static str,
    [storage, script_storage, safetensors]: [Option<&'static str>; 3],
) -> Row {
    Row { dtype, size, name, storage, script_storage, safetensors }
}

const ROWS: [Row; 20] = [
    row(Dtype::Bool, 1, "bool", [Some("BoolStorage"), None, Some("BOOL")]),
    row(Dtype::Uint8, 1, "uint8", [Some("ByteStorage"), None, Some("U8")]),
    row(Dtype::Uint16, 2, "uint16", [None, None, Some("U16")]),
    row(Dtype::Uint32, 4, "uint32", [None, None, Some("U32")]),
    row(Dtype::Uint64, 8, "uint64", [None, None, Some("U64")]),
    row(Dtype::Int8, 1, "int8", [Some("CharStorage"), None, Some("I8")]),
    row(Dtype::Int16, 2, "int16", [Some("ShortStorage"), None, Some("I16")]),
    row(Dtype::Int32, 4, "int32", [Some("IntStorage"), None, Some("I32")]),
    row(Dtype::Int64, 8, "int64", [Some("LongStorage"), None, Some("I64")]),
    row(Dtype::Float16, 2, "float16", [Some("HalfStorage"), None, Some("F16")]),
    row(Dtype::BFloat16, 2, "bfloat16", [Some("BFloat16Storage"), None, Some("BF16")]),
    row(Dtype::Float32, 4, "float32", [Some("FloatStorage"), None, Some("F32")]),
    row(Dtype::Float64, 8, "float64", [Some("DoubleStorage"), None, Some("F64")]),
    row(Dtype::Complex32, 4, "complex32", [None, Some("ComplexHalfStorage"), None]),
    row(Dtype::Complex64, 8, "complex64", [Some("ComplexFloatStorage"), None, Some("C64")]),
    row(Dtype::Complex128, 16, "complex128", [Some("ComplexDoubleStorage"), None, None]),
    row(Dtype::Float8E5m2, 1, "float8_e5m2", [None, Some("Float8_e5m2Storage"), Some("F8_E5M2")]),
    row(
        Dtype::Float8E4m3fn,
        1,
        "float8_e4m3fn",
        [None, Some("Float8_e4m3fnStorage"), Some("F8_E4M3")],
    ),
    row(
        Dtype::Float8E5m2fnuz,
        1,
        "float8_e5m2fnuz",
        [None, Some("Float8_e5m2fnuzStorage"), Some("F8_E5M2FNUZ")],
    ),
    row(
        Dtype::Float8E4m3fnuz,
        1,
        "float8_e4m3fnuz",
        [None, Some("Float8_e4m3fnuzStorage"), Some("F8_E4M3FNUZ")],
    ),
];

impl Dtype {
    /// Every dtype.
    pub const ALL: [Self; 20] = {
        let mut all = [Self::Bool; 20];
        let mut at = 0;
        while at < all.len() {
            all[at] = ROWS[at].dtype;
            at += 1;
        }
        all
    };

    const fn row(self) -> &'static Row {
        &ROWS[self as usize]
    }

    /// Returns the size of an element in bytes.
    pub const fn size(self) -> usize {
        self.row().size
    }

    /// Returns the name in Python, without `torch.`, such as `float32`.
    pub const fn name(self) -> &'static str {
        self.row().name
    }

    /// Returns the name in the header of a safetensors file, such as `F32`; `None` for those that the format lacks.
    pub const fn safetensors_name(self) -> Option<&'static str> {
        self.row().safetensors
    }

    /// Returns the dtype of a type of Rust.
    pub fn of<T: Element>() -> Self {
        T::DTYPE
    }

    /// Returns the class of storages that `torch.save` writes for tensors of the dtype, if it has one of its own.
    pub(crate) const fn storage(self) -> Option<&'static str> {
        self.row().storage
    }

    /// Returns the dtype whose [`name`](Self::name) this is.
    pub fn named(name: &str) -> Option<Self> {
        ROWS.iter().find(|row| row.name == name).map(|row| row.dtype)
    }

    /// Returns the dtype of a class of storages.
    pub(crate) fn of_storage(class: &str) -> Option<Self> {
        let is_it = |row: &&Row| [row.storage, row.script_storage].contains(&Some(class));
        ROWS.iter().find(is_it).map(|row| row.dtype)
    }

    /// Returns the dtype of a name in the header of a safetensors file.
    pub(crate) fn from_safetensors(name: &str) -> Option<Self> {
        ROWS.iter().find(|row| row.safetensors == Some(name)).map(|row| row.dtype)
    }

    /// Returns whether tensors of the dtype can require gradients.
    pub(crate) fn is_differentiable(self) -> bool {
        !matches!(
            self,
            Self::Bool
                | Self::Uint8
                | Self::Uint16
                | Self::Uint32
                | Self::Uint64
                | Self::Int8
                | Self::Int16
                | Self::Int32
                | Self::Int64
        )
    }
}

/// The name in Python, without `torch.`.
impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A type of Rust whose numbers a file can hold: the integers, `f32`, `f64`, and `half`'s `f16` and `bf16`.
pub trait Element: Copy + sealed::Sealed {
    /// Its dtype.
    const DTYPE: Dtype;

    /// Makes a number of its little-endian bytes, of which there are [`Dtype::size`].
    #[doc(hidden)]
    fn from_bytes(bytes: &[u8]) -> Self;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! elements {
    ($($type:ty: $dtype:ident),+) => {
        $(impl sealed::Sealed for $type {}

        impl Element for $type {
            const DTYPE: Dtype = Dtype::$dtype;

            fn from_bytes(bytes: &[u8]) -> Self {
                let mut own = [0; size_of::<Self>()];
                own.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
                Self::from_le_bytes(own)
            }
        })+
    };
}

elements!(
    u8: Uint8, u16: Uint16, u32: Uint32, u64: Uint64, i8: Int8, i16: Int16, i32: Int32, i64: Int64,
    f16: Float16, bf16: BFloat16, f32: Float32, f64: Float64
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_dtype_has_its_row_and_names_of_its_own() {
        for (at, dtype) in Dtype::ALL.into_iter().enumerate() {
            assert_eq!(dtype as usize, at);
            assert_eq!(dtype.row().dtype, dtype);
            assert_eq!(Dtype::named(dtype.name()), Some(dtype));
            let Row { storage, script_storage, safetensors, .. } = dtype.row();
            for class in [storage, script_storage].into_iter().flatten() {
                assert_eq!(Dtype::of_storage(class), Some(dtype));
            }
            assert!(safetensors.is_none_or(|name| Dtype::from_safetensors(name) == Some(dtype)));
        }
        assert_eq!(size_of::<f16>(), Dtype::of::<f16>().size());
        assert_eq!(f16::from_bytes(&[0, 0x3c]), f16::ONE);
        assert_eq!(i32::from_bytes(&[0xfe, 0xff, 0xff, 0xff]), -2);
    }
}

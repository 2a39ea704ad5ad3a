//! The dtypes that reports name.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use tch::Kind;

use crate::ffi::insight::RecordedTensor;

/// A dtype in a report. Its text, by `Display` and as data, is its name, such as `bf16`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Dtype {
    /// `bf16`
    BF16,
    /// `bool`
    Bool,
    /// `complex128`
    Complex128,
    /// `complex32`
    Complex32,
    /// `complex64`
    Complex64,
    /// `fp16`
    F16,
    /// `fp32`
    F32,
    /// `fp64`
    F64,
    /// `int16`
    Int16,
    /// `int32`
    Int32,
    /// `int64`
    Int64,
    /// `int8`
    Int8,
    /// `other`
    #[default]
    Other,
    /// `uint8`
    Uint8,
}

/// A dtype, its name, and libtorch's number and tch's name for it.
type Row = (Dtype, &'static str, Option<(i8, Kind)>);

/// In the order of the names.
const ALL: [Row; 14] = [
    (Dtype::BF16, "bf16", Some((15, Kind::BFloat16))),
    (Dtype::Bool, "bool", Some((11, Kind::Bool))),
    (Dtype::Complex128, "complex128", Some((10, Kind::ComplexDouble))),
    (Dtype::Complex32, "complex32", Some((8, Kind::ComplexHalf))),
    (Dtype::Complex64, "complex64", Some((9, Kind::ComplexFloat))),
    (Dtype::F16, "fp16", Some((5, Kind::Half))),
    (Dtype::F32, "fp32", Some((6, Kind::Float))),
    (Dtype::F64, "fp64", Some((7, Kind::Double))),
    (Dtype::Int16, "int16", Some((2, Kind::Int16))),
    (Dtype::Int32, "int32", Some((3, Kind::Int))),
    (Dtype::Int64, "int64", Some((4, Kind::Int64))),
    (Dtype::Int8, "int8", Some((1, Kind::Int8))),
    (Dtype::Other, "other", None),
    (Dtype::Uint8, "uint8", Some((0, Kind::Uint8))),
];

impl Dtype {
    /// The dtype of a tensor.
    pub(super) fn of(tensor: &RecordedTensor) -> Self {
        Self::known(|(.., of_libtorch)| of_libtorch.is_some_and(|(code, _)| code == tensor.dtype))
    }

    fn known(is: impl Fn(&&Row) -> bool) -> Self {
        ALL.iter().find(is).map_or(Self::Other, |(dtype, ..)| *dtype)
    }

    /// Returns the name.
    pub fn as_str(self) -> &'static str {
        ALL[self as usize].1
    }

    /// Returns whether it is bf16 or fp16.
    pub fn is_half(self) -> bool {
        matches!(self, Self::BF16 | Self::F16)
    }
}

impl From<Kind> for Dtype {
    fn from(kind: Kind) -> Self {
        Self::known(|(.., of_libtorch)| of_libtorch.is_some_and(|(_, known)| known == kind))
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// Compares the names.
impl PartialEq<&str> for Dtype {
    fn eq(&self, name: &&str) -> bool {
        self.as_str() == *name
    }
}

impl Serialize for Dtype {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl<'de> Deserialize<'de> for Dtype {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let written = String::deserialize(deserializer)?;
        Ok(Self::known(|(_, name, _)| *name == written))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_are_in_the_order_of_the_dtypes() {
        for (place, (dtype, name, _)) in ALL.into_iter().enumerate() {
            assert_eq!((dtype as usize, dtype.as_str(), dtype), (place, name, dtype));
        }
        assert!(ALL.is_sorted_by(|a, b| a.1 < b.1), "reports list dtypes by name");
    }

    #[test]
    fn a_dtype_is_written_as_its_name_and_an_unknown_name_is_another_dtype() {
        for (dtype, name, _) in ALL {
            let written = serde_json::to_string(&dtype).unwrap();
            assert_eq!(written, format!("\"{name}\""));
            assert_eq!(serde_json::from_str::<Dtype>(&written).unwrap(), dtype);
        }
        assert_eq!(serde_json::from_str::<Dtype>("\"fp8\"").unwrap(), Dtype::Other);
    }
}

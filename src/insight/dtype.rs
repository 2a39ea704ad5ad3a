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

/// The names, in their order, and libtorch's numbers.
const ALL: [(Dtype, &str, Option<i8>); 14] = [
    (Dtype::BF16, "bf16", Some(15)),
    (Dtype::Bool, "bool", Some(11)),
    (Dtype::Complex128, "complex128", Some(10)),
    (Dtype::Complex32, "complex32", Some(8)),
    (Dtype::Complex64, "complex64", Some(9)),
    (Dtype::F16, "fp16", Some(5)),
    (Dtype::F32, "fp32", Some(6)),
    (Dtype::F64, "fp64", Some(7)),
    (Dtype::Int16, "int16", Some(2)),
    (Dtype::Int32, "int32", Some(3)),
    (Dtype::Int64, "int64", Some(4)),
    (Dtype::Int8, "int8", Some(1)),
    (Dtype::Other, "other", None),
    (Dtype::Uint8, "uint8", Some(0)),
];

impl Dtype {
    /// The dtype of a tensor.
    pub(super) fn of(tensor: &RecordedTensor) -> Self {
        let known = ALL.iter().find(|(_, _, code)| *code == Some(tensor.dtype));
        known.map_or(Self::Other, |(dtype, ..)| *dtype)
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
        match kind {
            Kind::BFloat16 => Self::BF16,
            Kind::Bool => Self::Bool,
            Kind::ComplexDouble => Self::Complex128,
            Kind::ComplexHalf => Self::Complex32,
            Kind::ComplexFloat => Self::Complex64,
            Kind::Half => Self::F16,
            Kind::Float => Self::F32,
            Kind::Double => Self::F64,
            Kind::Int16 => Self::Int16,
            Kind::Int => Self::Int32,
            Kind::Int64 => Self::Int64,
            Kind::Int8 => Self::Int8,
            Kind::Uint8 => Self::Uint8,
            _ => Self::Other,
        }
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
        let known = ALL.iter().find(|(_, name, _)| *name == written);
        Ok(known.map_or(Self::Other, |(dtype, ..)| *dtype))
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

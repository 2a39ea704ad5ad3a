//! The checksums of a safetensors checkpoint.

use std::fmt;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

/// A 64-bit XXH3 checksum. It is written as 16 hexadecimal digits, so that the length of a header does not depend on
/// it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Checksum(pub(crate) u64);

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl Serialize for Checksum {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Checksum {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let digits = String::deserialize(deserializer)?;
        let number = u64::from_str_radix(&digits, 16).map_err(D::Error::custom)?;
        let checksum = Self(number);
        // Only the spelling that this crate writes is accepted, because the header's own checksum is located in the
        // header by it.
        if checksum.to_string() == digits {
            Ok(checksum)
        } else {
            Err(D::Error::custom("a checksum that is not 16 hexadecimal digits"))
        }
    }
}

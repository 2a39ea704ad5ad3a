//! A checkpoint file that has been opened.
//!
//! Both formats are read into an [`Archive`]. Its parts refer to tensors by their positions in the file. Its regions
//! are the bytes with a checksum: XXH3 for each tensor of a safetensors file, and CRC-32 for each record of PyTorch's
//! zip archives.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use xxhash_rust::xxh3::Xxh3Default;

use crate::checkpoint::part::Part;
use crate::checkpoint::source::Source;
use crate::error::{Error, Result, shown};

/// The content of a file, and the checksums to verify it.
#[derive(Debug)]
pub(crate) struct Archive {
    pub(crate) source: Arc<Source>,
    pub(crate) parts: BTreeMap<String, Part>,
    pub(crate) regions: Vec<Region>,
}

/// A range of bytes with a checksum.
#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) name: String,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) check: Check,
}

#[derive(Debug)]
pub(crate) enum Check {
    Xxh3(Checksum),
    Crc32(u32),
}

impl Archive {
    /// Reads the bytes of all regions once and compares their checksums.
    pub(crate) fn verify(&self) -> Result<()> {
        for Region { name, offset, len, check } in &self.regions {
            let for_all = |take: &mut dyn FnMut(&[u8])| {
                self.source.read_chunks(*offset, *len, &mut |bytes| {
                    take(bytes);
                    Ok::<_, Error>(())
                })
            };
            let same = match check {
                Check::Xxh3(wanted) => {
                    let mut hash = Xxh3Default::new();
                    for_all(&mut |bytes| hash.update(bytes))?;
                    Checksum(hash.digest()) == *wanted
                }
                Check::Crc32(wanted) => {
                    let mut hash = crc32fast::Hasher::new();
                    for_all(&mut |bytes| hash.update(bytes))?;
                    hash.finalize() == *wanted
                }
            };
            // A fuzzer cannot guess checksums.
            if !same && !cfg!(fuzzing) {
                let problem = format!("the checksum of `{}` does not match", shown(name));
                return Err(self.source.damaged(problem).into());
            }
        }
        Ok(())
    }
}

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
    fn serialize<S: serde::Serializer>(
        &self,
        serializer: S,
    ) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Checksum {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
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

//! A checkpoint file that has been opened.
//!
//! Both formats are read into an [`Archive`]. Its parts refer to tensors by their places in the file. Its regions are
//! the bytes with a checksum: XXH3 for each tensor of a safetensors file, and CRC-32 for each record of PyTorch's zip
//! archives.

use std::collections::BTreeMap;
use std::sync::Arc;

use xxhash_rust::xxh3::Xxh3Default;

use crate::checkpoint::checksum::Checksum;
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

//! What a file of PyTorch's may ask for.

use crate::checkpoint::MAX_VALUES;

/// How much a file may ask for before it is refused.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    /// Bytes of the pickle.
    pub max_pickle_bytes: u64,
    /// Bytes of all strings together for each byte of the pickle, which may repeat them, and a megabyte besides.
    pub max_text_factor: u64,
    /// Values in the result, and those that the pickle makes on the way. A tensor counts its dimensions, too.
    pub max_values: u64,
    /// Containers inside of each other.
    pub max_depth: usize,
    /// Records of the archive.
    pub max_records: usize,
    /// Bytes of all tensors together that have more elements than their storages, as expanded ones have.
    pub max_expanded_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_pickle_bytes: 100_000_000,
            max_text_factor: 16,
            max_values: MAX_VALUES,
            max_depth: 64,
            max_records: 1 << 18,
            max_expanded_bytes: 1 << 30,
        }
    }
}

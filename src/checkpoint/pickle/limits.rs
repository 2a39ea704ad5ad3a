//! The limits on a file in PyTorch's format.

use crate::checkpoint::{MAX_TENSORS, MAX_VALUES};

/// The limits beyond which a file is refused.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    /// The size of the pickle in bytes.
    pub max_pickle_bytes: u64,
    /// The total size of all strings as a multiple of the size of the pickle, which can refer to a string repeatedly. A
    /// MiB is always allowed in addition.
    pub max_text_factor: u64,
    /// The number of values in the result, and likewise of those that the pickle makes on the way. Of a tensor the
    /// dimensions count as well.
    pub max_values: u64,
    /// The number of tensors that the pickle makes. Each takes as much memory as many values.
    pub max_tensors: u64,
    /// The depth of nested containers.
    pub max_depth: usize,
    /// The number of records in the archive.
    pub max_records: usize,
    /// The total size in bytes of all tensors that have more elements than their storages, as expanded tensors do.
    pub max_expanded_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_pickle_bytes: 100_000_000,
            max_text_factor: 16,
            max_values: MAX_VALUES,
            max_tensors: MAX_TENSORS as u64,
            max_depth: 64,
            max_records: MAX_TENSORS,
            max_expanded_bytes: 1 << 30,
        }
    }
}

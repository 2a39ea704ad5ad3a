//! The limits on the content of a file, so that loading a hostile one takes little memory.

/// The most values that a file may hold besides its tensors. Many small values take the most memory for their size in
/// the file.
pub(crate) const MAX_VALUES: u64 = 2_000_000;

/// The most tensors and the most parameters of optimizers that a file may have.
pub(crate) const MAX_TENSORS: usize = 1 << 18;

/// The most parts that a file may have, counting those within others. Each takes more memory than a value.
pub(crate) const MAX_PARTS: usize = 100_000;

/// The size in bytes of the largest header of a safetensors file that is read, the same as in other readers of the
/// format.
pub(crate) const MAX_HEADER_BYTES: u64 = 100_000_000;

/// The largest size in bytes of the JSON that this crate adds to such a header.
pub(crate) const MAX_MANIFEST_BYTES: usize = 32 << 20;

/// The limits beyond which a file in PyTorch's format is refused.
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

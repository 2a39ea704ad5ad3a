//! The limits on the content of a file, so that opening a hostile one takes little memory.

/// The limits beyond which a file is refused. With the default ones, opening a file takes at most about three times its
/// size plus 256 MiB, whatever is in it. The index of a folder of `torch.distributed.checkpoint` can take more: up to
/// some 200 bytes for each of its values.
///
/// # Examples
///
/// ```
/// use torch_files::{Limits, TorchFile};
///
/// let few = Limits { max_tensors: 1000, ..Limits::default() };
/// # let file = std::env::temp_dir().join(format!("torch-files-limits-{}.safetensors", std::process::id()));
/// # std::fs::write(&file, b"\x02\0\0\0\0\0\0\0{}")?;
/// let file = TorchFile::open_with(file, &few)?;
/// # std::fs::remove_file(file.path())?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Limits {
    /// The size of the pickle in bytes.
    pub max_pickle_bytes: u64,
    /// The size in bytes of the header of a safetensors file, the same as in other readers of the format, and of an
    /// index.
    pub max_header_bytes: u64,
    /// The total size of all strings as a multiple of the size of the pickle, which can refer to a string repeatedly. A
    /// MiB is always allowed in addition.
    pub max_text_factor: u64,
    /// The number of values in the result, and likewise of those that the pickle makes on the way. Of a tensor the
    /// dimensions count as well. The index of a folder of `torch.distributed.checkpoint` has values of its own, of
    /// which each piece of a tensor takes some 50: so many, or 128 times `max_tensors` if that is more.
    pub max_values: u64,
    /// The number of tensors, in all files of an index or a folder together. Each takes as much memory as many values.
    /// Of a tensor in several safetensors shards each piece counts.
    pub max_tensors: u64,
    /// The depth of nested containers.
    pub max_depth: usize,
    /// The number of records in an archive, of files in a folder, and of entries in the metadata of a safetensors file.
    pub max_records: usize,
    /// The total size in bytes of all tensors that have more elements than their storages, as expanded tensors do.
    pub max_expanded_bytes: u64,
}

impl Limits {
    /// The limits of [`default`](Self::default), as a constant.
    pub const DEFAULT: Self = Self {
        max_pickle_bytes: 100_000_000,
        max_header_bytes: 100_000_000,
        max_text_factor: 16,
        max_values: 2_000_000,
        max_tensors: 1 << 18,
        max_depth: 64,
        max_records: 1 << 18,
        max_expanded_bytes: 1 << 30,
    };
}

impl Default for Limits {
    fn default() -> Self {
        Self::DEFAULT
    }
}

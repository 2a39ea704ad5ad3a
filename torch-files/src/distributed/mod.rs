//! Folders of `torch.distributed.checkpoint`, in which several processes save one checkpoint.
//!
//! Such a folder has files `__RANK_NUMBER.distcp`, in which one `torch.save` archive follows the other: each holds a
//! tensor, a piece of one, or another object. Its index `.metadata` is a pickle that says which names there are, and in
//! which file, at which place, each piece is. It is written last, so that a folder without an index is one whose save
//! has not finished.
//!
//! [`TorchFile::open`](crate::TorchFile::open) reads a folder, and a [`FolderWriter`] writes one.

// `read` opens a folder, `write` lays one out and writes the share of a process, `shared` begins and finishes a save,
// and `files` knows which files of a folder are whose, and removes them.

mod files;
mod read;
mod shards;
mod shared;
#[cfg(test)]
mod tests;
mod write;

use crate::error::Error;
use crate::source::Checksum;

pub use files::{is_whole, remove, remove_leftover};
pub(crate) use read::{Opened, open};
pub(crate) use shards::{SHARDING, Shards, sharding_of, shards_in};
pub use shared::{Share, SharedSave};
pub use write::FolderWriter;

/// The name of the index.
pub(crate) const INDEX: &str = ".metadata";

/// The name under which Python writes the index, before it renames it.
const UNFINISHED_INDEX: &str = ".metadata.tmp";

/// The ending of the other files.
const ENDING: &str = ".distcp";

/// What this crate writes after the pickle of an index, where Python does not look: this, the checksum of the pickle in
/// hexadecimal digits, and a line break. Python writes nothing there.
const MARK: &[u8] = b"torch-files xxh3 ";

/// Returns what follows a pickle in an index that this crate has written.
fn trailer(pickle: &[u8]) -> Vec<u8> {
    [MARK, Checksum::of([pickle]).to_string().as_bytes(), b"\n"].concat()
}

/// Returns the rank and the number in the name of a file with entries; `None` for another file.
fn numbers(name: &str) -> Option<(u64, u64)> {
    let (rank, number) = name.strip_prefix("__")?.strip_suffix(ENDING)?.split_once('_')?;
    let parsed = (rank.parse().ok()?, number.parse().ok()?);
    // Only names as PyTorch writes them: others belong to somebody else.
    (name_of(parsed.0, parsed.1) == name).then_some(parsed)
}

fn name_of(rank: u64, number: u64) -> String {
    format!("__{rank}_{number}{ENDING}")
}

fn unwritable(name: Option<&str>, problem: impl Into<String>) -> Error {
    Error::Unwritable { entry: name.map(str::to_owned), problem: problem.into() }
}

//! Folders of `torch.distributed.checkpoint`, in which several processes save one checkpoint.
//!
//! Such a folder has files `__RANK_NUMBER.distcp`, in which one `torch.save` archive follows the other: each holds a
//! tensor, a piece of one, or another object. Its index `.metadata` is a pickle that says which names there are, and in
//! which file, at which place, each piece is. It is written last, so that a folder without an index is one whose save
//! has not finished.
//!
//! There is a second kind without a pickle: safetensors files that say in `DCP_SHARDING_INFO` where their pieces of
//! tensors begin, as Python's `HuggingFaceStorageWriter` writes them. Python writes no index for the files of several
//! processes; this crate writes `model.safetensors.index.json` last, and refuses its own files without it, because
//! their save has not finished.
//!
//! [`TorchFile::open`](crate::TorchFile::open) reads a folder of either kind; a [`FolderWriter`] writes one of the
//! first kind, and a [`ShardWriter`] the share of a process in one of the second.

// `names` has the kinds and the names of files. `read` opens a folder of distcp files, and `shards` puts tensors
// together of the pieces in safetensors files. `write` and `shard_writer` lay out and write the share of a process, of
// which `index` makes an index; `shared` begins and finishes a save, and `files` knows which files are whose, and
// removes them.

mod files;
mod index;
mod names;
mod read;
mod shard_writer;
mod shards;
mod shared;
#[cfg(test)]
mod tests;
mod write;

use crate::error::Error;
use crate::source::Checksum;

pub use files::{is_whole, remove, remove_leftover};
pub use index::Share;
pub use names::FolderKind;
use names::INDEX;
pub(crate) use read::{Opened, open};
pub use shard_writer::ShardWriter;
pub(crate) use shards::{PREFIX, SHARDING, Shards, has_later_pieces, sharding_of, shards_in};
pub use shared::SharedSave;
pub use write::FolderWriter;

/// What this crate writes after the pickle of an index, where Python does not look: this, the checksum of the pickle in
/// hexadecimal digits, and a line break. Python writes nothing there.
const MARK: &[u8] = b"torch-files xxh3 ";

/// Returns what follows a pickle in an index that this crate has written.
fn trailer(pickle: &[u8]) -> Vec<u8> {
    [MARK, Checksum::of([pickle]).to_string().as_bytes(), b"\n"].concat()
}

fn unwritable(name: Option<&str>, problem: impl Into<String>) -> Error {
    Error::Unwritable { entry: name.map(str::to_owned), problem: problem.into() }
}

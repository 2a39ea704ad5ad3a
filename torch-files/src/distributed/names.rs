//! The two kinds of folders, and the names of their files.

use std::path::Path;

use crate::index;

/// The name of the index of distcp files.
pub(super) const INDEX: &str = ".metadata";

/// The ending of their names.
const ENDING: &str = ".distcp";

/// How the shares of the processes are written to a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FolderKind {
    /// Files `__RANK_NUMBER.distcp` of `torch.save` archives, and the pickle `.metadata` as their index. What Python's
    /// `dcp.save` writes by default; see [`FolderWriter`](super::FolderWriter).
    Distcp,
    /// Safetensors files `shard-RANK-model-NUMBER-of-NUMBER.safetensors`, in which each tensor is whole and RANK counts
    /// from 1, and `model.safetensors.index.json` as their index. Python's `HuggingFaceStorageReader` reads them, and
    /// so do the libraries that read a model in several safetensors files; see [`ShardWriter`](super::ShardWriter).
    Safetensors,
}

impl FolderKind {
    pub(super) const ALL: [Self; 2] = [Self::Distcp, Self::Safetensors];

    /// Returns the kind of a folder that has an index.
    pub(crate) fn of(folder: &Path) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| folder.join(kind.index()).is_file())
    }

    /// Returns the name of the index.
    pub(super) fn index(self) -> &'static str {
        match self {
            Self::Distcp => INDEX,
            Self::Safetensors => index::NAME,
        }
    }

    /// Returns the number of the files of a first save, as Python counts.
    pub(super) fn first_number(self) -> u64 {
        match self {
            Self::Distcp => 0,
            Self::Safetensors => 1,
        }
    }

    /// Returns the name of the file of a rank.
    pub(super) fn name_of(self, rank: u64, number: u64) -> String {
        match self {
            Self::Distcp => format!("__{rank}_{number}{ENDING}"),
            Self::Safetensors => {
                let rank = rank.saturating_add(1);
                format!("shard-{rank:05}-model-{number:05}-of-{number:05}.safetensors")
            }
        }
    }

    /// Returns the rank and the number in the name of such a file; `None` for another file.
    pub(super) fn numbers(self, name: &str) -> Option<(u64, u64)> {
        let (rank, number) = match self {
            Self::Distcp => {
                let (rank, number) =
                    name.strip_prefix("__")?.strip_suffix(ENDING)?.split_once('_')?;
                (rank.parse().ok()?, number.parse().ok()?)
            }
            Self::Safetensors => {
                let (rank, rest) = name.strip_prefix("shard-")?.split_once("-model-")?;
                let rank: u64 = rank.parse().ok()?;
                (rank.checked_sub(1)?, rest.split_once("-of-")?.0.parse().ok()?)
            }
        };
        // Only names as PyTorch writes them: others belong to somebody else.
        (self.name_of(rank, number) == name).then_some((rank, number))
    }

    /// Returns whether a name is one under which Python writes an index before it renames it.
    pub(super) fn is_unfinished_index(self, name: &str) -> bool {
        self == Self::Distcp && name == ".metadata.tmp"
    }
}

//! What the processes of a save tell each other, and the index that is made of it.

use std::collections::{BTreeMap, HashSet};

use serde::{Deserialize, Serialize};

use super::{FolderKind, trailer, unwritable};
use crate::error::Result;
use crate::index;
use crate::limits::Limits;
use crate::pickle::{self, Entry, Kind};
use crate::source::Checksum;

/// What one of several processes has saved: its part of the index, to be sent to rank 0.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Share(pub(super) Content);

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Content {
    Entries(Vec<Entry>),
    Shard {
        /// For the index.
        metadata: BTreeMap<String, String>,
        /// `None` without tensors.
        file: Option<Shard>,
    },
}

/// A safetensors file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Shard {
    pub(super) name: String,
    pub(super) len: u64,
    /// That of its header.
    pub(super) header: Checksum,
    /// The tensors with their sizes in bytes.
    pub(super) tensors: Vec<(String, u64)>,
}

/// An index that can be written.
pub(super) struct Index {
    pub(super) bytes: Vec<u8>,
    /// The names of the files that it names, and how long each is at least.
    pub(super) files: BTreeMap<String, u64>,
}

impl Index {
    /// Makes the index of all shares.
    pub(super) fn of(
        kind: FolderKind,
        shares: impl IntoIterator<Item = Share>,
        limits: &Limits,
    ) -> Result<Self> {
        let (mut entries, mut texts, mut shards) = (Vec::new(), BTreeMap::new(), Vec::new());
        for Share(content) in shares {
            match content {
                Content::Entries(more) if kind == FolderKind::Distcp => entries.extend(more),
                Content::Shard { metadata, file } if kind == FolderKind::Safetensors => {
                    for (key, text) in metadata {
                        if texts.contains_key(&key) {
                            return Err(unwritable(Some(&key), TWICE));
                        }
                        texts.insert(key, text);
                    }
                    shards.extend(file);
                }
                _ => return Err(unwritable(None, "a process has saved its share as another kind")),
            }
        }
        match kind {
            FolderKind::Distcp => Self::of_entries(merged(entries)?, limits),
            FolderKind::Safetensors => Self::of_shards(&texts, shards, limits),
        }
    }

    fn of_entries(entries: Vec<Entry>, limits: &Limits) -> Result<Self> {
        let bytes = index_of(&entries, limits)?;
        let mut files = BTreeMap::new();
        for entry in entries.into_iter().filter(|entry| !matches!(entry.kind, Kind::Empty)) {
            let len = files.entry(entry.file).or_insert(0);
            *len = entry.start.saturating_add(entry.len).max(*len);
        }
        Ok(Self { bytes, files })
    }

    fn of_shards(
        texts: &BTreeMap<String, String>,
        shards: Vec<Shard>,
        limits: &Limits,
    ) -> Result<Self> {
        let (mut files, mut headers) = (BTreeMap::new(), BTreeMap::new());
        let (mut names, mut total) = (BTreeMap::new(), 0u64);
        for Shard { name: file, len, header, tensors } in shards {
            for (name, size) in tensors {
                total = total.saturating_add(size);
                if names.contains_key(&name) {
                    return Err(unwritable(Some(&name), TWICE));
                }
                names.insert(name, file.clone());
            }
            headers.insert(file.clone(), header);
            files.insert(file, len);
        }
        if names.len() as u64 > limits.max_tensors {
            return Err(unwritable(
                None,
                format!("it has more than {} tensors", limits.max_tensors),
            ));
        }
        if files.len() > limits.max_records {
            return Err(unwritable(None, format!("it has more than {} files", limits.max_records)));
        }
        let bytes = index::write(texts, total, &headers, &names);
        let bytes = bytes.map_err(|problem| unwritable(None, problem))?;
        if bytes.len() as u64 > limits.max_header_bytes {
            let problem =
                format!("its index would have more than {} bytes", limits.max_header_bytes);
            return Err(unwritable(None, problem));
        }
        Ok(Self { bytes, files })
    }
}

const TWICE: &str = "two processes have saved it";

/// Merges the entries of all shares: sorted by name, without those of empty dicts in which another share has something.
fn merged(mut entries: Vec<Entry>) -> Result<Vec<Entry>> {
    entries.sort_by(|one, other| one.name.cmp(&other.name));
    let within: HashSet<_> = entries
        .iter()
        .flat_map(|entry| (1..entry.path.len()).map(|len| entry.path[..len].to_vec()))
        .collect();
    entries.retain(|entry| !matches!(entry.kind, Kind::Empty) || !within.contains(&entry.path));
    entries.dedup_by(|one, other| {
        matches!((&one.kind, &other.kind), (Kind::Empty, Kind::Empty)) && one.path == other.path
    });
    match entries.windows(2).find(|pair| pair[0].name == pair[1].name) {
        Some(pair) => Err(unwritable(Some(&pair[0].name), TWICE)),
        None => Ok(entries),
    }
}

/// Makes the index, with the checksum after it.
pub(super) fn index_of(entries: &[Entry], limits: &Limits) -> Result<Vec<u8>> {
    let limit = limits.max_tensors;
    if entries.len() as u64 > limit {
        let problem = format!("it has more than {limit} tensors and values");
        return Err(unwritable(None, problem));
    }
    let pickle = pickle::write_index(entries, limits);
    let mut index = pickle.map_err(|problem| unwritable(None, problem))?;
    index.extend(trailer(&index));
    if index.len() as u64 > limits.max_pickle_bytes {
        let problem = format!("its index would have more than {} bytes", limits.max_pickle_bytes);
        return Err(unwritable(None, problem));
    }
    Ok(index)
}

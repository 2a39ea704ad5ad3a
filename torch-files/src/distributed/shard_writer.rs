//! Writing the share of a process as a safetensors file.

use std::collections::BTreeMap;
use std::io;

use serde::Serialize;

use super::index::{Content, Shard, Share};
use super::shards::SHARDING;
use super::shared::SharedSave;
use super::{FolderKind, unwritable};
use crate::atomic::Target;
use crate::dtype::Dtype;
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::index;
use crate::limits::Limits;
use crate::safetensors::{CHECKSUMS, LENGTH, checksums_as_text};
use crate::source::Checksum;
use crate::writer::{Hashed, Storage, Writer};

/// The share of one process, laid out as a safetensors shard: everything that could fail because of its content was
/// checked. Each tensor is whole in the file of one process.
///
/// Python reads the folder with `dcp.load` and a `HuggingFaceStorageReader`, and by its index it is a model in several
/// safetensors files.
///
/// # Examples
///
/// ```
/// use std::collections::BTreeMap;
///
/// use torch_files::distributed::{FolderKind, ShardWriter, SharedSave};
/// use torch_files::{Dtype, Limits, TorchFile};
///
/// # let folder = std::env::temp_dir().join(format!("torch-files-doc-shards-{}", std::process::id()));
/// let begun = SharedSave::begin(&folder, FolderKind::Safetensors)?;
/// let mut shares = Vec::new();
/// for (rank, name) in ["a", "b"].into_iter().enumerate() {
///     // In a process of its own.
///     let save = SharedSave::join(&folder, FolderKind::Safetensors)?.with_number(begun.number());
///     let tensor = (name.to_owned(), Dtype::Uint8, vec![3], vec![1, 2, 3]);
///     let mut writer = ShardWriter::new([tensor], BTreeMap::new(), &Limits::default())?;
///     shares.push(writer.save_share(&save, rank as u64)?);
/// }
/// let _durable = begun.finish(shares, &Limits::default())?;
/// let file = TorchFile::open(&folder)?;
/// file.verify()?;
/// assert_eq!(file.tensors().len(), 2);
/// # std::fs::remove_dir_all(folder)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct ShardWriter<S> {
    writer: Writer<Hashed<S>>,
    /// The names of the tensors, with their sizes in bytes.
    tensors: Vec<(String, u64)>,
    /// That of the file, and that of the index.
    own: BTreeMap<String, String>,
    metadata: BTreeMap<String, String>,
}

/// What Python writes of the piece of a tensor.
#[derive(Serialize)]
struct Saved {
    saved_offsets: Vec<u64>,
}

impl<S: Storage> ShardWriter<S> {
    /// Lays out the tensors that this process saves, as [`Writer::safetensors`] does. One process passes the metadata
    /// of the index, which [`TorchFile::metadata`](crate::TorchFile::metadata) returns; the others pass an empty map.
    ///
    /// # Errors
    ///
    /// Those of [`Writer::safetensors`]; [`Error::Unwritable`] for metadata named `torch_files` or `total_size`, which
    /// the index has itself.
    pub fn new(
        tensors: impl IntoIterator<Item = (String, Dtype, Vec<i64>, S)>,
        metadata: BTreeMap<String, String>,
        limits: &Limits,
    ) -> Result<Self> {
        if let Some(name) = index::taken(&metadata) {
            let problem = "the index has this entry itself; choose another name";
            return Err(unwritable(Some(name), problem));
        }
        let (mut laid_out, mut names, mut saved) = (Vec::new(), Vec::new(), BTreeMap::new());
        for (name, dtype, shape, storage) in tensors {
            names.push((name.clone(), storage.size_in_bytes()));
            saved.insert(name.clone(), Saved { saved_offsets: vec![0; shape.len()] });
            laid_out.push((name, dtype, shape, Hashed::new(storage)));
        }
        let refuse = |error: serde_json::Error| unwritable(None, error.to_string());
        let sharding = serde_json::to_string(&saved).map_err(refuse)?;
        let sums = checksums_as_text(names.iter().map(|_| Checksum::default()));
        let own = [
            ("format", "pt".to_owned()),
            ("DCP_VERSION", "1.0".to_owned()),
            (SHARDING, sharding),
            (CHECKSUMS, sums),
        ];
        let own: BTreeMap<_, _> = own.map(|(key, text)| (key.to_owned(), text)).into();
        let writer = Writer::safetensors(laid_out, own.clone(), limits)?;
        Ok(Self { writer, tensors: names, own, metadata })
    }

    /// Saves the share of the process with this rank in a save of [`FolderKind::Safetensors`]: to one file, or to none
    /// if it has no tensors. Nothing refers to the file before [`SharedSave::finish`].
    ///
    /// # Errors
    ///
    /// Those of [`atomic::replace`](crate::atomic::replace). No file is left then.
    pub fn save_share(&mut self, save: &SharedSave, rank: u64) -> Result<Share> {
        let metadata = self.metadata.clone();
        if self.tensors.is_empty() {
            return Ok(Share(Content::Shard { metadata, file: None }));
        }
        save.replace_file_of(rank, FolderKind::Safetensors, &mut |out| self.write_to(out))?;
        let header = self.writer.header();
        let sizes = self.tensors.iter().map(|(_, size)| size);
        let file = Shard {
            name: save.name_of(rank),
            len: header.len() as u64 + sizes.sum::<u64>(),
            header: Checksum::of([&header[LENGTH as usize..]]),
            tensors: self.tensors.clone(),
        };
        Ok(Share(Content::Shard { metadata, file: Some(file) }))
    }

    /// Writes the tensors, and then the header with their checksums.
    fn write_to(&mut self, out: &mut dyn Target) -> io::Result<()> {
        self.writer.write_to(out)?;
        let sums = self.writer.storages().iter().map(Hashed::checksum);
        self.own.insert(CHECKSUMS.to_owned(), checksums_as_text(sums));
        self.writer.set_metadata(&self.own).map_err(io::Error::other)?;
        self.writer.rewrite_header(out)
    }
}

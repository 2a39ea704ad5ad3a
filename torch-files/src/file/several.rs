//! A model in several files: by its index, or a folder of shards without one.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;

use super::{FileKind, TorchFile};
use crate::distributed::{self, Shards};
use crate::error::{Error, Malformed, Result};
use crate::index::{self, Index};
use crate::limits::Limits;
use crate::safetensors::{self, checksums_of};
use crate::source::{Checksum, Source, newest};
use crate::text::shown;
use crate::value::{Text, Value};

impl TorchFile {
    /// Opens the files that an index names. Their storages get the names of the files before their keys.
    pub(super) fn of_index(path: &Path, limits: &Limits) -> Result<Self> {
        let index = || {
            let source = Source::open(path)?;
            let bytes = source.all(limits.max_header_bytes);
            Ok((source, bytes.map_err(|malformed| malformed.at(path))?))
        };
        newest(&index, &index::is_ours, &mut |source, bytes| {
            let index = index::parse(bytes, limits).map_err(|malformed| malformed.at(path))?;
            Self::of_parsed_index(source, index, limits)
        })
    }

    fn of_parsed_index(source: Source, index: Index, limits: &Limits) -> Result<Self> {
        let Index { files, metadata, headers } = index;
        let folder = source.path().parent().unwrap_or(Path::new("")).to_owned();
        let mut several = Several::new(source, files.len(), limits);
        several.whole.metadata = metadata;
        let mut in_pieces = Vec::new();
        for (file, names) in files {
            let opened = several.open(&folder.join(&file))?;
            several.check_header(&file, &opened, headers.as_ref())?;
            if distributed::sharding_of(&opened.metadata).is_some() {
                several.add_shard(&file, opened)?;
                in_pieces.push((file, names));
            } else {
                several.add(&file, opened, names)?;
            }
        }
        for (file, names) in in_pieces {
            for name in names {
                if !several.shards.has(&name, &file) {
                    return Err(several.without(&name, &file));
                }
                several.join(&name)?;
            }
        }
        Ok(several.whole())
    }

    /// Opens all shards of a folder that has no index, except those that this crate has written: their save has not
    /// finished.
    pub(super) fn of_shards(folder: &Path, files: &[String], limits: &Limits) -> Result<Self> {
        let mut several = Several::new(Source::nothing(folder), files.len(), limits);
        for file in files {
            let opened = several.open(&folder.join(file))?;
            if checksums_of(&opened.metadata).is_none() {
                several.add_shard(file, opened)?;
            }
        }
        if several.shards.is_empty() {
            let problem =
                format!("it has no index `{}`, so that its save has not finished", index::NAME);
            return Err(several.whole.source.malformed(problem));
        }
        let is_one_save = several.shards.check_one_save();
        is_one_save.map_err(|malformed| malformed.at(folder))?;
        for name in several.shards.names() {
            several.join(&name)?;
        }
        Ok(several.whole())
    }

    /// Returns whether this is one of several safetensors shards, which may have only a piece of each tensor: open the
    /// folder instead. That is known of a shard that this crate has written, of one that has a later piece of a tensor,
    /// and of one beside others, by their names.
    pub fn is_one_of_shards(&self) -> bool {
        let sharding = distributed::sharding_of(&self.metadata);
        self.kind == FileKind::Safetensors
            && sharding.is_some_and(|sharding| {
                checksums_of(&self.metadata).is_some()
                    || distributed::has_later_pieces(sharding)
                    || self.is_beside_shards()
            })
    }

    /// Returns whether the name is that of a shard, and the folder has another one.
    fn is_beside_shards(&self) -> bool {
        let is_shard = |name: &str| name.starts_with(distributed::PREFIX);
        let (folder, name) = (self.path().parent(), self.path().file_name());
        if !name.and_then(OsStr::to_str).is_some_and(is_shard) {
            return false;
        }
        let folder = folder.filter(|folder| !folder.as_os_str().is_empty());
        let files = distributed::shards_in(folder.unwrap_or(Path::new(".")), &Limits::DEFAULT);
        files.is_ok_and(|files| files.iter().filter(|name| is_shard(name)).count() > 1)
    }
}

/// A model in several files, of which some were opened.
struct Several<'a> {
    whole: TorchFile,
    items: Vec<(Value, Value)>,
    shards: Shards,
    /// How many files there are, and how many tensors those have that were opened.
    files: usize,
    tensors: u64,
    limits: &'a Limits,
}

impl<'a> Several<'a> {
    fn new(index: Source, files: usize, limits: &'a Limits) -> Self {
        let whole = TorchFile { kind: FileKind::Index, ..TorchFile::empty(Arc::new(index)) };
        Self { whole, items: Vec::new(), shards: Shards::default(), files, tensors: 0, limits }
    }

    /// Opens a file.
    fn open(&mut self, path: &Path) -> Result<TorchFile> {
        let limits = self.limits;
        if self.files > limits.max_records {
            return Err(self.too_much("files", limits.max_records as u64));
        }
        let source = Source::open_one_of(path, self.files)?;
        let opened = TorchFile::of_source(source, limits)?;
        self.tensors = self.tensors.saturating_add(opened.storages.len() as u64);
        if self.tensors > limits.max_tensors {
            return Err(self.too_much("tensors", limits.max_tensors));
        }
        Ok(opened)
    }

    /// Fails unless a shard of this crate is the one that its index, with these checksums of headers, was written for.
    fn check_header(
        &self,
        file: &str,
        opened: &TorchFile,
        headers: Option<&BTreeMap<String, Checksum>>,
    ) -> Result<()> {
        let problem = match headers.map(|headers| headers.get(file)) {
            None if checksums_of(&opened.metadata).is_none() => return Ok(()),
            None => {
                "its index has lost the checksums of its files; restore the index as it was saved"
            }
            Some(sum) => {
                let header = safetensors::read_header(&opened.source, self.limits);
                let header = header.map_err(|malformed| malformed.at(opened.path()))?;
                // A fuzzer cannot guess checksums.
                if sum == Some(&Checksum::of([&header[..]])) || cfg!(fuzzing) {
                    return Ok(());
                }
                "it is not the file that its index was written for: the checksum of its header does not match"
            }
        };
        Err(opened.source.malformed(problem))
    }

    fn too_much(&self, what: &'static str, limit: u64) -> Error {
        Malformed::TooMuch { what, limit }.at(self.whole.path())
    }

    fn without(&self, name: &str, file: &str) -> Error {
        let problem = format!("`{}` is not in `{}`", shown(name), shown(file));
        self.whole.source.malformed(problem)
    }

    /// Adds the values with these names in a file, which has them as a whole.
    fn add(&mut self, file: &str, opened: TorchFile, names: Vec<String>) -> Result<()> {
        let TorchFile { value, storages, mut regions, .. } = opened;
        self.whole.regions.append(&mut regions);
        let Value::Dict(values) = value else {
            let problem = format!("`{file}` in it does not hold a dict");
            return Err(self.whole.source.malformed(problem));
        };
        let key_of = |key: &str| Text::from(format!("{file}/{key}"));
        let storages = storages.into_iter().map(|(key, place)| (key_of(&key), place));
        self.whole.storages.extend(storages);
        let named = |(key, value): (Value, Value)| Some((Text::from(key.text()?), value));
        let mut values: HashMap<_, _> = values.into_iter().filter_map(named).collect();
        for name in names {
            let Some((name, mut value)) = values.remove_entry(name.as_str()) else {
                return Err(self.without(&name, file));
            };
            value.for_each_tensor(&mut |tensor| tensor.storage = key_of(&tensor.storage));
            self.items.push((Value::Text(name), value));
        }
        Ok(())
    }

    /// Adds the tensors of a shard, which are pieces of those that [`join`](Self::join) makes.
    fn add_shard(&mut self, file: &str, opened: TorchFile) -> Result<()> {
        let TorchFile { source, value, metadata, storages, mut regions, .. } = opened;
        self.whole.regions.append(&mut regions);
        let (Some(sharding), Value::Dict(tensors)) = (distributed::sharding_of(&metadata), value)
        else {
            let problem = format!(
                "it is in a folder without an index, and has no `{}`, without which it is no shard; open it by itself",
                distributed::SHARDING
            );
            return Err(source.malformed(problem));
        };
        let added = self.shards.add(file, sharding, tensors, &storages);
        added.map_err(|malformed| malformed.at(source.path()))
    }

    /// Makes a tensor of its pieces in all shards.
    fn join(&mut self, name: &str) -> Result<()> {
        let joined = self.shards.take(name);
        let joined = joined.map_err(|malformed| malformed.at(self.whole.path()))?;
        let Some((value, storage)) = joined else { return Ok(()) };
        self.whole.storages.extend(storage);
        self.items.push((Value::Text(name.into()), value));
        Ok(())
    }

    fn whole(self) -> TorchFile {
        TorchFile { value: Value::Dict(self.items), ..self.whole }
    }
}

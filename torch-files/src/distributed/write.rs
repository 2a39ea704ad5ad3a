//! Laying out a folder, and writing the share of a process.

use std::io::{self, BufWriter, Cursor, Seek, SeekFrom, Write};
use std::path::Path;

use super::index::{Content, Share, index_of};
use super::shared::SharedSave;
use super::{FolderKind, unwritable};
use crate::atomic::{Replaced, Target};
#[cfg(doc)]
use crate::error::Error;
use crate::error::{Result, invalid};
use crate::limits::Limits;
use crate::pickle::{self, Entry, Kind, PathItem};
use crate::value::{TensorRef, Value};
use crate::writer::Storage;
use crate::zip;

/// The alignment of archives in bytes, that of the elements within them, so that they can be mapped into memory.
const ALIGNMENT: u64 = 64;

/// Up to how many bytes of elements an archive is made in memory and written at once.
const SMALL: u64 = 1 << 16;

/// The only storage of an archive.
const KEY: &str = "0";

/// A checkpoint that is laid out as a folder of `torch.distributed.checkpoint`: everything that could fail because of
/// its content was checked.
///
/// Python reads it with `dcp.load`, and makes one file of it with
/// `python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE`.
///
/// # Examples
///
/// ```
/// use torch_files::distributed::FolderWriter;
/// use torch_files::{Dtype, FileKind, Limits, TensorRef, TorchFile, Value};
///
/// # let folder = std::env::temp_dir().join(format!("torch-files-doc-folder-{}", std::process::id()));
/// let weight = TensorRef::contiguous("0", Dtype::Float32, vec![2]);
/// let model = Value::Dict(vec![("weight".into(), weight.into())]);
/// let value = Value::Dict(vec![("model".into(), model), ("epoch".into(), Value::Int(3))]);
/// let weights = [[1f32, 2.0].map(f32::to_le_bytes).concat()];
/// let _durable = FolderWriter::new(&value, weights, &Limits::default())?.save(&folder)?;
///
/// let file = TorchFile::open(&folder)?;
/// assert_eq!((file.kind(), file.tensors()[0].0.as_str()), (FileKind::Distributed, "model.weight"));
/// # std::fs::remove_dir_all(folder)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct FolderWriter<S> {
    /// Sorted by name; where they are is not known yet.
    entries: Vec<(Entry, Archive)>,
    storages: Vec<S>,
    limits: Limits,
    /// How many more values the objects may have together.
    values: u64,
}

fn has_data((entry, _): &(Entry, Archive)) -> bool {
    !matches!(entry.kind, Kind::Empty)
}

/// What the archive of an entry is made of; an empty dict has none.
#[derive(Debug)]
struct Archive {
    pickle: Vec<u8>,
    storage: Option<usize>,
}

impl<S: Storage> FolderWriter<S> {
    /// Lays out the nested dicts of a value as Python does: a tensor becomes an entry whose name is made of the keys on
    /// the way to it, with dots between them. So does every other value that is no dict, and a list as a whole if it
    /// has no dicts and tensors in it. Empty dicts, which Python leaves out, are noted for readers of this crate. The
    /// tensors refer to the storages by their numbers, and each is the whole of its storage in row-major order.
    ///
    /// # Errors
    ///
    /// [`Error::Unwritable`] for a value that is no dict, for two entries of one name, for a tensor that is a view of
    /// its storage or is in a tuple, and for what [`Writer::torch`](crate::Writer::torch) refuses.
    pub fn new(
        value: &Value,
        storages: impl IntoIterator<Item = S>,
        limits: &Limits,
    ) -> Result<Self> {
        let storages: Vec<S> = storages.into_iter().collect();
        let (limits, values) = (limits.clone(), limits.max_values);
        let mut writer = Self { entries: Vec::new(), storages, limits, values };
        let Value::Dict(items) = value else {
            return Err(unwritable(None, "only a dict can be a folder"));
        };
        for (key, item) in items {
            writer.flatten(Vec::new(), key, item)?;
        }
        writer.entries.sort_by(|(one, _), (other, _)| one.name.cmp(&other.name));
        let same = |pair: &&[(Entry, Archive)]| pair[0].0.name == pair[1].0.name;
        if let Some(pair) = writer.entries.windows(2).find(same) {
            let problem =
                "two of its entries have this name, which is made of the keys on the way to each";
            return Err(unwritable(Some(&pair[0].0.name), problem));
        }
        let entries: Vec<_> = writer.entries.iter().map(|(entry, _)| entry.clone()).collect();
        drop(index_of(&entries, &writer.limits)?);
        Ok(writer)
    }

    fn flatten(&mut self, mut path: Vec<PathItem>, key: &Value, value: &Value) -> Result<()> {
        let Some(name) = key.key_text() else {
            return Err(unwritable(None, "a key is not a string, a number or None"));
        };
        path.push(PathItem::Key(name.to_string()));
        self.flatten_at(path, value)
    }

    fn flatten_at(&mut self, path: Vec<PathItem>, value: &Value) -> Result<()> {
        if path.len() >= self.limits.max_depth {
            return Err(unwritable(None, "the values are nested too deep"));
        }
        match value {
            Value::Dict(items) if !items.is_empty() => {
                items.iter().try_for_each(|(key, item)| self.flatten(path.clone(), key, item))
            }
            Value::Map(fields) if !fields.is_empty() => {
                let at = |key: &str| [&path[..], &[PathItem::Key(key.to_owned())]].concat();
                fields.iter().try_for_each(|(key, item)| self.flatten_at(at(key), item))
            }
            Value::List(items) if !is_terminal(items) => {
                let at = |place: usize| [&path[..], &[PathItem::Place(place as i64)]].concat();
                let mut items = items.iter().enumerate();
                items.try_for_each(|(place, item)| self.flatten_at(at(place), item))
            }
            Value::Tensor(tensor) => self.add_tensor(path, tensor),
            Value::Dict(_) | Value::Map(_) => self.add(path, Kind::Empty, value, &[], None),
            other => self.add(path, Kind::Object, other, &[], None),
        }
    }

    fn add_tensor(&mut self, path: Vec<PathItem>, tensor: &TensorRef) -> Result<()> {
        let number = tensor.storage.parse::<usize>().ok();
        let storage = number.and_then(|number| Some((number, self.storages.get(number)?)));
        let name = name(&path);
        let Some((number, storage)) = storage else {
            return Err(unwritable(Some(&name), "it has no data"));
        };
        let len = storage.size_in_bytes();
        let is_whole = tensor.is_contiguous() && tensor.offset == 0;
        if !is_whole || tensor.size_in_bytes() != len {
            return Err(unwritable(Some(&name), "it is not the whole of its storage"));
        }
        let TensorRef { dtype, shape, .. } = tensor;
        let kind = Kind::Tensor {
            dtype: *dtype,
            shape: shape.clone(),
            offsets: vec![0; shape.len()],
            sizes: shape.clone(),
        };
        let alone = TensorRef { storage: KEY.into(), ..tensor.clone() }.into();
        self.add(path, kind, &alone, &[(KEY.to_owned(), len)], Some(number))
    }

    fn add(
        &mut self,
        path: Vec<PathItem>,
        kind: Kind,
        value: &Value,
        storages: &[(String, u64)],
        storage: Option<usize>,
    ) -> Result<()> {
        let name = name(&path);
        let pickle = pickle::write_counted(value, storages, &self.limits);
        let (pickle, values) = pickle.map_err(|problem| unwritable(Some(&name), problem))?;
        // A reader has one limit for all objects.
        if matches!(kind, Kind::Object) {
            self.values = self.values.checked_sub(values).ok_or_else(|| {
                let limit = self.limits.max_values;
                unwritable(Some(&name), format!("there are more than {limit} values with it"))
            })?;
        }
        // The largest places take the most bytes in the index.
        let (start, len) = (i64::MAX.unsigned_abs(), i64::MAX.unsigned_abs());
        let file = FolderKind::Distcp.name_of(u64::MAX, u64::MAX);
        let entry = Entry { name, path, kind, file, start, len };
        self.entries.push((entry, Archive { pickle, storage }));
        Ok(())
    }

    /// Saves to a folder, which is created unless it exists. Of a folder that exists, the index is replaced as a
    /// whole or not at all, and then the files that only the old index names are removed. So a crash at any point
    /// leaves the old checkpoint or the complete new one; of a new folder it can leave files without an index, see
    /// [`remove_leftover`](super::remove_leftover).
    ///
    /// # Errors
    ///
    /// Those of [`SharedSave::begin`] and [`atomic::replace`](crate::atomic::replace).
    pub fn save(&self, folder: impl AsRef<Path>) -> Result<Replaced> {
        let begun = SharedSave::begin(folder, FolderKind::Distcp)?;
        let share = self.save_share(&begun, 0);
        share.and_then(|share| begun.finish([share], &self.limits)).inspect_err(|_| {
            begun.remove_share(0);
            begun.remove_folder();
        })
    }

    /// Leaves out the entries for which `keep` returns false: those that another process saves. It gets the storage of
    /// a tensor, and `None` for anything else.
    pub fn retain(&mut self, mut keep: impl FnMut(Option<&S>) -> bool) {
        let storages = &self.storages;
        self.entries.retain(|(_, archive)| keep(archive.storage.and_then(|at| storages.get(at))));
    }

    /// Saves the share that the process with this rank has in a checkpoint that several save together: to one file, or
    /// to none if it has no entries. Nothing refers to the file before [`SharedSave::finish`].
    ///
    /// # Errors
    ///
    /// Those of [`atomic::replace`](crate::atomic::replace). No file is left then.
    pub fn save_share(&self, save: &SharedSave, rank: u64) -> Result<Share> {
        let file = save.name_of(rank);
        let mut entries: Vec<_> = Vec::new();
        if self.entries.iter().any(has_data) {
            save.replace_file_of(rank, FolderKind::Distcp, &mut |out| {
                entries = self.write_to(out, &file)?;
                Ok(())
            })?;
        } else {
            entries.extend(self.entries.iter().map(|(entry, _)| entry.clone()));
        }
        Ok(Share(Content::Entries(entries)))
    }

    fn write_to(&self, out: &mut dyn Target, file: &str) -> io::Result<Vec<Entry>> {
        let mut entries = Vec::with_capacity(self.entries.len());
        let mut at = 0u64;
        for (entry, archive) in &self.entries {
            if matches!(entry.kind, Kind::Empty) {
                entries.push(entry.clone());
                continue;
            }
            let start = at.next_multiple_of(ALIGNMENT);
            out.write_all(&[0; ALIGNMENT as usize][..(start - at) as usize])?;
            at = start + self.write_archive(archive, out, start)?;
            let (file, len) = (file.to_owned(), at - start);
            entries.push(Entry { file, start, len, ..entry.clone() });
        }
        Ok(entries)
    }

    /// Writes an archive, which begins at `start`. Returns its length.
    fn write_archive(
        &self,
        archive: &Archive,
        out: &mut dyn Target,
        start: u64,
    ) -> io::Result<u64> {
        let storage = archive.storage.and_then(|storage| self.storages.get(storage));
        let lengths: Vec<_> =
            storage.iter().map(|storage| (KEY.to_owned(), storage.size_in_bytes())).collect();
        let mut fill =
            |_, out: &mut dyn Write| storage.map_or(Ok(()), |storage| storage.write_to(out));
        if lengths.iter().all(|(_, len)| *len <= SMALL) {
            let made = Cursor::new(Vec::new());
            let made = zip::write(made, &archive.pickle, &lengths, &mut fill)?.into_inner();
            out.write_all(&made)?;
            return Ok(made.len() as u64);
        }
        let part = BufWriter::new(Part { out, start });
        let part = zip::write(part, &archive.pickle, &lengths, &mut fill)?;
        let mut part = part.into_inner().map_err(io::IntoInnerError::into_error)?;
        part.stream_position()
    }
}

/// What follows the first `start` bytes of a file.
struct Part<'a> {
    out: &'a mut dyn Target,
    start: u64,
}

impl Write for Part<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.out.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

impl Seek for Part<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let to = match to {
            SeekFrom::Start(at) => SeekFrom::Start(self.start + at),
            relative => relative,
        };
        let at = self.out.seek(to)?;
        at.checked_sub(self.start).ok_or_else(|| invalid("a place before the archive"))
    }
}

/// Joins the keys on the way to an entry.
fn name(path: &[PathItem]) -> String {
    let items = path.iter().map(|item| match item {
        PathItem::Key(key) => key.clone(),
        PathItem::Place(place) => place.to_string(),
    });
    items.collect::<Vec<_>>().join(".")
}

/// Returns whether a list is an entry: Python divides those with dicts and tensors, and lists of such.
fn is_terminal(items: &[Value]) -> bool {
    items.iter().all(|item| match item {
        Value::Dict(_) | Value::Map(_) | Value::Tensor(_) => false,
        Value::List(items) => is_terminal(items),
        _ => true,
    })
}

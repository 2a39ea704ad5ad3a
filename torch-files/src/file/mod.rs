//! An open file of any format.

mod several;

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use crate::distributed::{self, FolderKind};
use crate::dtype::Element;
use crate::error::{Error, Malformed, Result};
use crate::index;
use crate::limits::Limits;
use crate::pickle::{self, Bytes, First};
use crate::place::{Backing, Place, read_view, zeros};
use crate::safetensors::checksums_of;
use crate::source::{CHUNK, Checksum, ChecksumWriter, Cursor, Region, Source, Sum, mismatch};
use crate::text::shown;
use crate::torch::{CONSTANTS, Opened, PICKLE};
use crate::value::{TensorRef, Text, Value};
use crate::writer::Storage;
use crate::zip::ZipRecord;
use crate::{old, safetensors, threads, torch, zip};

/// An open file of PyTorch or safetensors: its values, and the places of its tensors, whose elements are read when they
/// are asked for.
///
/// Nothing in a file is executed: of what a pickle would call in Python, the few functions that checkpoints need make
/// values here, and everything else is a [`Value::Opaque`]. A hostile file is refused, or read within the [`Limits`].
///
/// Elements are little-endian, and a file that was written on a big-endian machine is refused. Tensors have the strides
/// that they had in PyTorch, of which [`read`](Self::read) makes row-major order.
///
/// Several threads may read from one file. It must not be modified in place while it is open; replacing it is fine.
///
/// # Examples
///
/// ```
/// use torch_files::{Limits, TensorRef, TorchFile, Value, Writer, Dtype};
///
/// # let path = std::env::temp_dir().join(format!("torch-files-doc-{}.pt", std::process::id()));
/// let weight = TensorRef::contiguous("0", Dtype::Float32, vec![2]);
/// let value = Value::Dict(vec![("weight".into(), weight.into()), ("epoch".into(), Value::Int(3))]);
/// let weights = [[1f32, 2.0].map(f32::to_le_bytes).concat()];
/// let _durable = Writer::torch(&value, weights, &Limits::default())?.save(&path)?;
///
/// let file = TorchFile::open(&path)?;
/// file.verify()?;
/// assert_eq!(file.value().get("epoch"), Some(&Value::Int(3)));
/// for (name, tensor) in file.tensors() {
///     println!("{name} {} {:?}", tensor.dtype, tensor.shape);
///     assert_eq!(file.to_vec::<f32>(tensor)?, [1.0, 2.0]);
/// }
/// # std::fs::remove_file(&path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct TorchFile {
    source: Arc<Source>,
    kind: FileKind,
    value: Value,
    metadata: BTreeMap<String, String>,
    storages: BTreeMap<Text, Place>,
    regions: Vec<(Arc<Source>, Region)>,
}

/// The format of a file, which its content says and not its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileKind {
    /// A zip archive of `torch.save`, since PyTorch 1.6.
    Torch,
    /// A zip archive of `torch.jit.save`, or of `VarStore::save` in tch: a module, of which the attributes are read.
    TorchScript,
    /// A file of `torch.save` before PyTorch 1.6, without checksums.
    Legacy,
    /// A plain pickle, without storages; numpy's arrays in it are tensors.
    Pickle,
    /// Named tensors, without checksums unless the file is a shard that this crate has written.
    Safetensors,
    /// A model in several files of the other formats, which an index beside them names; or a folder of safetensors
    /// shards of `torch.distributed.checkpoint` without an index.
    Index,
    /// A folder of `torch.distributed.checkpoint`, in which tensors can be in pieces.
    Distributed,
}

impl TorchFile {
    /// Opens a file, or a folder of `torch.distributed.checkpoint`, with the default [`Limits`]. Reads its values, but
    /// not the elements of its tensors, and so finds no damage in those: see [`verify`](Self::verify).
    ///
    /// The tensors of such a folder have the shapes of the whole ones, of which each can be in pieces, and the value is
    /// the nested dict that was saved, with texts for the numbers that were keys.
    ///
    /// A folder without `.metadata` is opened by its `model.safetensors.index.json`, the same as that file itself. If
    /// it has none, it is one of safetensors shards, as Python's `HuggingFaceStorageWriter` writes them: files that say
    /// in `DCP_SHARDING_INFO` where their pieces of tensors begin. A tensor reaches as far as its pieces do. Nothing
    /// says how many files such a folder has: it is not noticed if the last ones are missing, or one of whole tensors.
    ///
    /// # Errors
    ///
    /// [`Error::Io`], [`Error::Malformed`] and [`Error::TooMuch`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_with(path, &Limits::default())
    }

    /// Opens a file with other limits. Otherwise the same as [`open`](Self::open).
    ///
    /// # Errors
    ///
    /// The same as [`open`](Self::open).
    pub fn open_with(path: impl AsRef<Path>, limits: &Limits) -> Result<Self> {
        if path.as_ref().is_dir() {
            return Self::of_folder(path.as_ref(), limits);
        }
        let source = Source::open(path.as_ref())?;
        if index::is_index(&beginning(&source)?) {
            return Self::of_index(path.as_ref(), limits);
        }
        Self::of_source(source, limits)
    }

    /// Reads the bytes of a file, and keeps them in memory. An index is refused, since its files are beside it.
    ///
    /// # Errors
    ///
    /// [`Error::Malformed`] and [`Error::TooMuch`].
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self> {
        Self::from_bytes_with(bytes, &Limits::default())
    }

    /// Reads the bytes of a file with other limits. Otherwise the same as [`from_bytes`](Self::from_bytes).
    ///
    /// # Errors
    ///
    /// The same as [`from_bytes`](Self::from_bytes).
    pub fn from_bytes_with(bytes: Vec<u8>, limits: &Limits) -> Result<Self> {
        Self::of_source(Source::in_memory(bytes), limits)
    }

    fn of_source(source: Source, limits: &Limits) -> Result<Self> {
        let start = beginning(&source)?;
        let file = Self::empty(Arc::new(source));
        let path = file.path().to_owned();
        let read = if safetensors::is_safetensors(&start) {
            file.with_safetensors(limits)
        } else if zip::is_zip(&start) {
            file.with_archive(limits)
        } else if old::is_old(&start) {
            file.with_pickles(limits)
        } else {
            let problem = match old::is_early_pickle(&start) {
                true => {
                    "it is a pickle of protocol 0 or 1, of which 2 to 5 are read; in Python, load it with `pickle.load` and \
                     write it with `pickle.dump(value, file, protocol=4)`"
                }
                false => "it is neither safetensors, a file of torch.save nor a pickle",
            };
            Err(Malformed::Whole(problem.to_owned()))
        };
        read.map_err(|malformed| malformed.at(&path))
    }

    fn empty(source: Arc<Source>) -> Self {
        Self {
            source,
            kind: FileKind::Torch,
            value: Value::None,
            metadata: BTreeMap::new(),
            storages: BTreeMap::new(),
            regions: Vec::new(),
        }
    }

    fn place(&self, offset: u64, len: u64) -> Place {
        Place::in_file(&self.source, offset, len)
    }

    fn with_safetensors(mut self, limits: &Limits) -> Result<Self, Malformed> {
        let header = safetensors::read(&self.source, limits)?;
        let sums = checksums_of(&header.metadata);
        let sums = sums.filter(|sums| sums.len() == header.tensors.len());
        let mut sums = sums.into_iter().flatten();
        let mut items = Vec::with_capacity(header.tensors.len());
        for (name, info) in header.tensors {
            let sum = sums.next();
            let name = Text::from(name);
            let value = match info.dtype {
                Ok(dtype) => {
                    let tensor = TensorRef::contiguous(Text::clone(&name), dtype, info.shape);
                    let offset = header.data + info.start;
                    let len = tensor.size_in_bytes();
                    self.storages.insert(Text::clone(&name), self.place(offset, len));
                    self.regions.extend(sum.map(|sum| {
                        let (name, sum) = (name.to_string(), Sum::Xxh3(sum));
                        (Arc::clone(&self.source), Region { name, offset, len, sum })
                    }));
                    tensor.into()
                }
                Err(dtype) => Value::Opaque(format!("torch-files has no dtype {dtype}").into()),
            };
            items.push((Value::Text(name), value));
        }
        (self.kind, self.metadata) = (FileKind::Safetensors, header.metadata);
        self.value = Value::Dict(items);
        Ok(self)
    }

    fn with_archive(mut self, limits: &Limits) -> Result<Self, Malformed> {
        let Opened { root, arrays, storages, others } =
            torch::open(Cursor::new(&self.source), limits)?;
        let is_script = others.contains_key(CONSTANTS);
        self.kind = if is_script { FileKind::TorchScript } else { FileKind::Torch };
        let region = |name: &str, record: &ZipRecord| {
            let ZipRecord { offset, len, crc32 } = *record;
            let (name, sum) = (name.to_owned(), Sum::Crc32(crc32));
            (Arc::clone(&self.source), Region { name, offset, len, sum })
        };
        let regions = storages.iter().map(|(key, record)| region(key, record));
        let regions: Vec<_> =
            regions.chain(others.iter().map(|(name, record)| region(name, record))).collect();
        self.regions = regions;
        let places = storages.into_iter().map(|(key, record)| (key, record.offset, record.len));
        let pickle = others.get(PICKLE).map_or(0, |record| record.offset);
        self.with_objects(root, places, arrays, pickle)
    }

    /// Reads a file that begins with a pickle: one of PyTorch before 1.6, or a pickle alone.
    fn with_pickles(mut self, limits: &Limits) -> Result<Self, Malformed> {
        let len = self.source.len().min(limits.max_pickle_bytes);
        let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
        self.source.read_at(0, &mut bytes).map_err(Malformed::Read)?;
        if !old::is_marked(&bytes) {
            drop(bytes);
            return self.with_plain_pickle(limits);
        }
        let opened = old::read(&bytes, &self.source, limits)?;
        drop(bytes);
        let old::Opened { root, storages, arrays, pickle } = opened;
        self.kind = FileKind::Legacy;
        let places = storages.into_iter().map(|(key, (start, len))| (key, start, len));
        self.with_objects(root, places, arrays, pickle)
    }

    /// Numpy's arrays are in the pickle itself, which may therefore be as large as any file.
    fn with_plain_pickle(mut self, limits: &Limits) -> Result<Self, Malformed> {
        let len = usize::try_from(self.source.len()).unwrap_or(usize::MAX);
        let mut bytes = Vec::new();
        if bytes.try_reserve_exact(len).is_err() {
            let problem = "it is a pickle that is larger than the memory";
            return Err(Malformed::Whole(problem.to_owned()));
        }
        bytes.resize(len, 0);
        self.source.read_at(0, &mut bytes).map_err(Malformed::Read)?;
        let max_pickle_bytes = limits.max_pickle_bytes.max(self.source.len());
        let limits = Limits { max_pickle_bytes, ..limits.clone() };
        let First { root, len, storages, arrays } = pickle::read_first(&bytes, &limits)?;
        if len != bytes.len() || !storages.is_empty() {
            let problem = "it is a plain pickle, but more bytes follow its end, or it refers to storages that only a \
                           file of torch.save has";
            return Err(Malformed::Whole(problem.to_owned()));
        }
        drop(bytes);
        self.kind = FileKind::Pickle;
        self.with_objects(root, [], arrays, 0)
    }

    /// Takes a saved object, given the keys, positions and lengths of its storages, and the position of the pickle, in
    /// which numpy's arrays are.
    fn with_objects(
        mut self,
        root: Value,
        storages: impl IntoIterator<Item = (Text, u64, u64)>,
        arrays: BTreeMap<Text, Bytes>,
        pickle: u64,
    ) -> Result<Self, Malformed> {
        let places = storages.into_iter().map(|(key, offset, len)| (key, self.place(offset, len)));
        let mut places: BTreeMap<_, _> = places.collect();
        for (key, bytes) in arrays {
            let len = bytes.len();
            let place = match bytes {
                Bytes::Here(range) => self.place(pickle + range.start as u64, len),
                Bytes::Made(source) => Place::in_file(&source, 0, len),
            };
            if places.insert(key, place).is_some() {
                let problem = "a storage has the name of a numpy array";
                return Err(Malformed::Whole(problem.to_owned()));
            }
        }
        (self.value, self.storages) = (root, places);
        Ok(self)
    }

    /// Opens a folder of `torch.distributed.checkpoint`, or of safetensors shards, with an index or without one.
    fn of_folder(folder: &Path, limits: &Limits) -> Result<Self> {
        match FolderKind::of(folder) {
            Some(FolderKind::Distcp) => {}
            Some(FolderKind::Safetensors) => {
                return Self::of_index(&folder.join(index::NAME), limits);
            }
            None => {
                let files = distributed::shards_in(folder, limits)?;
                if !files.is_empty() {
                    return Self::of_shards(folder, &files, limits);
                }
            }
        }
        let distributed::Opened { source, value, storages, regions } =
            distributed::open(folder, limits)?;
        let kind = FileKind::Distributed;
        Ok(Self { kind, value, storages, regions, ..Self::empty(Arc::new(source)) })
    }

    /// Returns the format of the file.
    pub fn kind(&self) -> FileKind {
        self.kind
    }

    /// Returns the path; `(memory)` for bytes.
    pub fn path(&self) -> &Path {
        self.source.path()
    }

    /// Returns the object that was saved. For safetensors and an index it is a dict of tensors.
    pub fn value(&self) -> &Value {
        &self.value
    }

    /// Takes the object out of the file, which then has `None` in its place, so that a large one need not be cloned.
    /// Its tensors can still be read.
    pub fn take_value(&mut self) -> Value {
        std::mem::take(&mut self.value)
    }

    /// Returns the texts in the `__metadata__` of a safetensors file, or in the `metadata` of an index. Other formats
    /// have none.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Returns every tensor in the value, with the keys and places on the way to it, separated by dots. The name of a
    /// value that is a tensor itself is empty.
    pub fn tensors(&self) -> Vec<(String, &TensorRef)> {
        let mut tensors = Vec::new();
        self.value.collect_tensors(&mut String::new(), &mut tensors);
        tensors
    }

    /// Reads the elements of a tensor in row-major order, as they are in the file. `to` must have exactly
    /// [`TensorRef::size_in_bytes`].
    ///
    /// Several threads read a large one, if there are cores for them. The tensor need not be one of the file: any view
    /// of one of its storages can be read, such as a part of a tensor. A tensor that is not contiguous takes memory for
    /// what lies between its first and its last element. One that a folder has in several pieces is only read with a
    /// dtype of the size of its own.
    ///
    /// # Errors
    ///
    /// [`Error::Request`] if there is no such storage, the tensor reaches out of it, or `to` is of another size;
    /// [`Error::Io`].
    pub fn read(&self, tensor: &TensorRef, to: &mut [u8]) -> Result<()> {
        let Place { backing, .. } = self.place_of(tensor)?;
        if to.len() as u64 != tensor.size_in_bytes() {
            let (wanted, given) = (tensor.size_in_bytes(), to.len());
            return Err(Error::Request(format!("the tensor has {wanted} bytes, not {given}")));
        }
        read_view(backing, tensor, to)
    }

    /// Returns the elements of a tensor in row-major order.
    ///
    /// # Errors
    ///
    /// [`Error::Request`] if the tensor is of another dtype or larger than the memory, and the errors of
    /// [`read`](Self::read).
    pub fn to_vec<T: Element>(&self, tensor: &TensorRef) -> Result<Vec<T>> {
        if tensor.dtype != T::DTYPE {
            let (found, wanted) = (tensor.dtype, T::DTYPE);
            return Err(Error::Request(format!(
                "the tensor is of the dtype {found}, not {wanted}"
            )));
        }
        self.place_of(tensor)?;
        let mut bytes = zeros(tensor.size_in_bytes())?;
        self.read(tensor, &mut bytes)?;
        Ok(bytes.chunks_exact(tensor.dtype.size()).map(T::from_bytes).collect())
    }

    /// Returns a tensor as something that a [`Writer`](crate::Writer) writes: its elements in row-major order.
    pub fn storage<'a>(&'a self, tensor: &TensorRef) -> impl Storage + use<'a> {
        InFile { file: self, tensor: tensor.clone() }
    }

    /// Reads the whole file once and compares all checksums that it has: archives have one for each record. Several
    /// threads do so if there are cores for them.
    ///
    /// # Errors
    ///
    /// [`Error::Malformed`] for a checksum that does not match, and [`Error::Io`].
    pub fn verify(&self) -> Result<()> {
        let bytes = self.regions.iter().map(|(_, region)| region.len).sum();
        threads::for_each(&self.regions, bytes, &|(source, region)| region.verify(source))
    }

    /// Compares checksums of tensors, in row-major order, that are not the file's own, with the names that errors show.
    /// As [`verify`](Self::verify), it reads on several threads.
    ///
    /// # Errors
    ///
    /// [`Error::Malformed`] for a checksum that does not match, and the errors of [`read`](Self::read).
    pub fn verify_tensors(&self, checks: &[(&str, &TensorRef, Checksum)]) -> Result<()> {
        let bytes = checks.iter().map(|(_, tensor, _)| tensor.size_in_bytes()).sum();
        threads::for_each(checks, bytes, &|(name, tensor, wanted)| {
            let mut hash = ChecksumWriter::new(io::sink());
            let read = self.pieces(tensor, &mut |bytes| hash.write_all(bytes))?;
            read.map_err(Error::io("read", self.path()))?;
            // A fuzzer cannot guess checksums.
            match hash.checksum() == *wanted || cfg!(fuzzing) {
                true => Ok(()),
                false => Err(mismatch(self.path(), name)),
            }
        })
    }

    /// Returns the size in bytes of the file, or of the index of a folder; 0 for a folder without one.
    pub fn size_in_bytes(&self) -> u64 {
        self.source.len()
    }

    /// Fills the buffer with the bytes of the file from `offset` on, whatever they are.
    ///
    /// # Errors
    ///
    /// [`Error::Malformed`] if the file ends before, and [`Error::Io`].
    pub fn read_bytes(&self, offset: u64, buffer: &mut [u8]) -> Result<()> {
        self.source.read_at(offset, buffer)
    }

    /// Returns the storage of a tensor that stays within it.
    fn place_of(&self, tensor: &TensorRef) -> Result<&Place> {
        let refuse = |problem: &str| {
            let key = shown(&tensor.storage);
            Error::Request(format!("a tensor in the storage {key} {problem}"))
        };
        let place = self.storages.get(&tensor.storage);
        let place = place.ok_or_else(|| refuse("is not one of this file"))?;
        tensor.check(place.len).map_err(refuse)?;
        match &place.backing {
            Backing::Pieces(pieces) if pieces.width() != tensor.dtype.size() as u64 => {
                Err(refuse("is in pieces, and has a dtype of another size than they have"))
            }
            _ => Ok(place),
        }
    }

    /// Calls `take` with the elements of a tensor in row-major order, in pieces if they are so in the file. The inner
    /// result is the first error of `take`.
    fn pieces(
        &self,
        tensor: &TensorRef,
        take: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<io::Result<()>> {
        self.place_of(tensor)?;
        let len = tensor.size_in_bytes();
        if !tensor.is_contiguous() {
            let mut bytes = zeros(len)?;
            self.read(tensor, &mut bytes)?;
            return Ok(take(&bytes));
        }
        let mut buffer = vec![0; CHUNK.min(usize::try_from(len).unwrap_or(CHUNK))];
        let mut done = 0;
        while done < len {
            let size = buffer.len().min(usize::try_from(len - done).unwrap_or(CHUNK));
            let bytes = &mut buffer[..size];
            let offset = tensor.offset + done / tensor.dtype.size() as u64;
            self.read(&tensor.piece(offset, size), bytes)?;
            if let Err(error) = take(bytes) {
                return Ok(Err(error));
            }
            done += size as u64;
        }
        Ok(Ok(()))
    }
}

/// Returns the first bytes of a file, by which its format is recognized.
fn beginning(source: &Source) -> Result<Vec<u8>> {
    let mut start = vec![0; source.len().min(9) as usize];
    source.read_at(0, &mut start)?;
    Ok(start)
}

/// A tensor of a file, to be written to another one.
struct InFile<'a> {
    file: &'a TorchFile,
    tensor: TensorRef,
}

impl Storage for InFile<'_> {
    fn size_in_bytes(&self) -> u64 {
        self.tensor.size_in_bytes()
    }

    fn write_to(&self, out: &mut dyn Write) -> io::Result<()> {
        self.file
            .pieces(&self.tensor, &mut |bytes| out.write_all(bytes))
            .map_err(io::Error::other)?
    }
}

impl TensorRef {
    /// Returns the elements from `offset` on that `bytes` bytes of the storage hold.
    fn piece(&self, offset: u64, bytes: usize) -> Self {
        let Self { storage, dtype, requires_grad, .. } = self;
        let numel = (bytes / dtype.size()) as i64;
        Self {
            storage: Arc::clone(storage),
            dtype: *dtype,
            offset,
            shape: vec![numel],
            strides: vec![1],
            requires_grad: *requires_grad,
        }
    }
}

impl Value {
    /// Changes every tensor in the value.
    pub(crate) fn for_each_tensor(&mut self, change: &mut dyn FnMut(&mut TensorRef)) {
        match self {
            Self::Tensor(tensor) => change(tensor),
            Self::List(items) | Self::Tuple(items) => {
                items.iter_mut().for_each(|item| item.for_each_tensor(change));
            }
            Self::Dict(items) => items.iter_mut().for_each(|(key, item)| {
                key.for_each_tensor(change);
                item.for_each_tensor(change);
            }),
            _ => {}
        }
    }

    fn collect_tensors<'a>(&'a self, path: &mut String, to: &mut Vec<(String, &'a TensorRef)>) {
        let len = path.len();
        let mut within = |name: &str, value: &'a Self| {
            if len > 0 {
                path.push('.');
            }
            path.push_str(name);
            value.collect_tensors(path, to);
            path.truncate(len);
        };
        match self {
            Self::Tensor(tensor) => to.push((path.clone(), tensor)),
            Self::List(items) | Self::Tuple(items) => {
                items.iter().enumerate().for_each(|(at, item)| within(&at.to_string(), item));
            }
            Self::Dict(items) => items.iter().for_each(|(key, item)| {
                within(key.key_text().as_deref().unwrap_or("?"), item);
            }),
            _ => {}
        }
    }
}

/// Checked here so that a change that loses it is noticed.
const _: () = {
    const fn is_shared_by_threads<T: Send + Sync>() {}
    is_shared_by_threads::<TorchFile>();
};

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

    use std::io::Cursor;

    use super::*;
    use crate::dtype::Dtype;
    use crate::writer::Writer;

    /// A file with a matrix of the numbers 0 to 5, transposed, expanded and as a whole.
    fn file() -> TorchFile {
        let whole = TensorRef::contiguous("0", Dtype::Float32, vec![2, 3]);
        let transposed = TensorRef { shape: vec![3, 2], strides: vec![1, 3], ..whole.clone() };
        let expanded =
            TensorRef { shape: vec![2, 2], strides: vec![0, 1], offset: 4, ..whole.clone() };
        let named = [("whole", whole), ("transposed", transposed), ("expanded", expanded)];
        let items = named.map(|(name, tensor)| (name.into(), tensor.into()));
        let numbers = [0f32, 1.0, 2.0, 3.0, 4.0, 5.0].map(f32::to_le_bytes).concat();
        let value = Value::List(vec![Value::Dict(items.to_vec())]);
        let mut out = Cursor::new(Vec::new());
        let writer = Writer::torch(&value, [numbers], &Limits::default()).unwrap();
        writer.write_to(&mut out).unwrap();
        TorchFile::from_bytes(out.into_inner()).unwrap()
    }

    #[test]
    fn elements_are_in_row_major_order_whatever_the_strides() {
        let file = file();
        let read: Vec<_> = file
            .tensors()
            .into_iter()
            .map(|(name, tensor)| (name, file.to_vec::<f32>(tensor).unwrap()))
            .collect();
        let expected = [
            ("0.whole", vec![0.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
            ("0.transposed", vec![0.0, 3.0, 1.0, 4.0, 2.0, 5.0]),
            ("0.expanded", vec![4.0, 5.0, 4.0, 5.0]),
        ];
        assert_eq!(read, expected.map(|(name, numbers)| (name.to_owned(), numbers)));
        let converted = file
            .tensors()
            .into_iter()
            .map(|(name, tensor)| (name, tensor.dtype, tensor.shape.clone(), file.storage(tensor)));
        let mut out = Cursor::new(Vec::new());
        let writer = Writer::safetensors(converted, BTreeMap::new(), &Limits::default()).unwrap();
        writer.write_to(&mut out).unwrap();
        let again = TorchFile::from_bytes(out.into_inner()).unwrap();
        for (name, tensor) in again.tensors() {
            let found = read.iter().find(|(other, _)| *other == name).unwrap();
            assert_eq!(again.to_vec::<f32>(tensor).unwrap(), found.1, "{name}");
        }
    }

    #[test]
    fn requests_that_are_not_of_the_file_are_refused() {
        let file = file();
        let whole = TensorRef::contiguous("0", Dtype::Float32, vec![2, 3]);
        let wrong = [
            TensorRef { storage: "1".into(), ..whole.clone() },
            TensorRef { offset: 1, ..whole.clone() },
            TensorRef { strides: vec![1], ..whole.clone() },
            TensorRef { dtype: Dtype::Float64, ..whole.clone() },
            TensorRef { shape: vec![1 << 55], strides: vec![0], ..whole.clone() },
        ];
        for tensor in wrong {
            let refused = file.to_vec::<f32>(&tensor).map(drop);
            assert!(matches!(refused, Err(Error::Request(_))), "{tensor:?}: {refused:?}");
            assert!(matches!(file.read(&tensor, &mut [0; 24]), Err(Error::Request(_))));
        }
        assert!(matches!(file.read(&whole, &mut [0; 23]), Err(Error::Request(_))));
        assert!(file.read(&whole, &mut [0; 24]).is_ok());
    }

    /// A dict and a list as Python writes them with these protocols.
    #[test]
    fn pickles_of_the_first_protocols_are_told_how_to_convert() {
        let early: [&[u8]; 4] = [
            b"(dp0\nVn\np1\nI3\ns.",
            b"(lp0\nI1\na.",
            b"}q\x00X\x01\x00\x00\x00nq\x01K\x03s.",
            b"]q\x00K\x01a.",
        ];
        for bytes in early {
            let error = TorchFile::from_bytes(bytes.to_vec()).unwrap_err().to_string();
            assert!(error.contains("`pickle.dump(value, file, protocol=4)`"), "{error}");
        }
        for bytes in [&b""[..], b"(", b"}", b"<!DOCTYPE html>", b"{\"a\": 1}", b"(deleted)"] {
            let error = TorchFile::from_bytes(bytes.to_vec()).unwrap_err().to_string();
            assert!(error.contains("neither safetensors"), "{error}");
        }
    }

    #[test]
    fn several_threads_read_one_file() {
        let file = file();
        let expected = file.to_vec::<f32>(file.tensors()[1].1).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        assert_eq!(file.to_vec::<f32>(file.tensors()[1].1).unwrap(), expected);
                    }
                });
            }
        });
    }
}

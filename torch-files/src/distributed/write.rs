//! Saving and removing folders.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::io::{self, BufWriter, Cursor, ErrorKind, Seek, SeekFrom, Write};
use std::path::{self, Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{INDEX, UNFINISHED_INDEX, name_of, numbers, trailer};
use crate::atomic::{self, Replaced, Target};
use crate::error::{Error, Result, invalid};
use crate::limits::Limits;
use crate::pickle::{self, Entry, Kind, PathItem};
use crate::text::shown;
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

/// A save of one checkpoint by several processes, whose folder all of them reach.
///
/// The process of rank 0 begins it and sends its number to the others, which join it. Each saves its share with
/// [`FolderWriter::save_share`] and sends that to rank 0, which finishes the save. Nobody reads a new folder before it is
/// finished.
///
/// # Examples
///
/// ```
/// use torch_files::distributed::{FolderWriter, SharedSave};
/// use torch_files::{Dtype, Limits, TensorRef, TorchFile, Value};
///
/// # let folder = std::env::temp_dir().join(format!("torch-files-doc-shared-{}", std::process::id()));
/// let tensor = |name: &str| TensorRef::contiguous(name, Dtype::Uint8, vec![1]).into();
/// let begun = SharedSave::begin(&folder)?;
/// let mut shares = Vec::new();
/// for rank in 0..2u8 {
///     // In a process of its own: all lay out the same, and each keeps what it saves.
///     let save = SharedSave::join(&folder, begun.number())?;
///     let value = Value::Dict(vec![("a".into(), tensor("0")), ("b".into(), tensor("1"))]);
///     let mut writer = FolderWriter::new(&value, [vec![0], vec![1]], &Limits::default())?;
///     writer.retain(|bytes| bytes.is_some_and(|bytes| bytes[0] == rank));
///     shares.push(writer.save_share(&save, rank.into())?);
/// }
/// let _durable = begun.finish(shares, &Limits::default())?;
/// assert_eq!(TorchFile::open(&folder)?.tensors().len(), 2);
/// # std::fs::remove_dir_all(folder)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct SharedSave {
    folder: PathBuf,
    /// That of the files of all processes, which no file in the folder has yet.
    number: u64,
    is_new: bool,
}

/// What one of several processes has saved: its part of the index, to be sent to rank 0.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Share {
    entries: Vec<Entry>,
}

impl SharedSave {
    /// Begins a save to a folder, which is created unless it exists. A checkpoint that is there stays until
    /// [`finish`](Self::finish).
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the folder cannot be created, is a file, or has other files and no index.
    pub fn begin(folder: impl AsRef<Path>) -> Result<Self> {
        let mut begun = Self::join(folder, 0)?;
        begun.is_new = make(&begun.folder)?;
        begun.number = next_number(&begun.folder).inspect_err(|_| begun.remove_folder())?;
        Ok(begun)
    }

    /// Joins a save that the process of rank 0 has begun with this number, under the path that the folder has here.
    /// Nothing is looked for in the folder.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the path is empty, or relative to a folder that does not exist any more.
    pub fn join(folder: impl AsRef<Path>, number: u64) -> Result<Self> {
        let folder = path::absolute(folder.as_ref()).map_err(Error::io("save", folder.as_ref()))?;
        Ok(Self { folder, number, is_new: false })
    }

    /// Returns the same save with another number, for a process that has joined before it knew the number.
    #[must_use]
    pub fn with_number(self, number: u64) -> Self {
        Self { number, ..self }
    }

    /// Returns the number that the other processes need to [`join`](Self::join).
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Completes the save with the index of all shares, and removes the files that only an old index names. An empty
    /// dict is left out where another share has what is in it.
    ///
    /// # Errors
    ///
    /// Those of [`atomic::replace`]; [`Error::Unwritable`] if two shares have an entry of the same name, or they are
    /// together beyond the limits; [`Error::Io`] if the file of a share is not there, because its process has saved it in
    /// another folder of that name. The checkpoint that was there is still complete then.
    pub fn finish(
        &self,
        shares: impl IntoIterator<Item = Share>,
        limits: &Limits,
    ) -> Result<Replaced> {
        let entries = merged(shares)?;
        self.check_files(&entries)?;
        let index = index_of(&entries, limits)?;
        let path = self.folder.join(INDEX);
        let replaced = atomic::replace(&path, &mut |out| out.write_all(&index))?;
        // A power loss may bring the old index back, which needs its files.
        if matches!(replaced, Replaced::Durable) {
            // It is saved, and the next save tries again.
            let kept = entries.into_iter().map(|entry| entry.file).collect();
            drop(remove_others(&self.folder, &kept, Duration::ZERO));
        }
        Ok(replaced)
    }

    /// Removes the share of a rank, of a save that will not be finished.
    pub fn remove_share(&self, rank: u64) {
        // What cannot be removed now is removed by a later save.
        drop(fs::remove_file(self.folder.join(name_of(rank, self.number))));
    }

    /// Removes the folder of a save that failed, if it was made for it and all shares are removed.
    pub fn remove_folder(&self) {
        if self.is_new {
            // Only if it is empty. The error of the save is the one to report.
            drop(fs::remove_dir(&self.folder));
        }
    }

    /// Fails if the file of an entry does not reach as far as its process has said.
    fn check_files(&self, entries: &[Entry]) -> Result<()> {
        let mut lengths = BTreeMap::new();
        for entry in entries.iter().filter(|entry| !matches!(entry.kind, Kind::Empty)) {
            let len = lengths.entry(&entry.file).or_insert(0);
            *len = entry.start.saturating_add(entry.len).max(*len);
        }
        for (file, len) in lengths {
            let path = self.folder.join(file);
            let found = fs::metadata(&path).map_err(Error::io(FIND, &path))?.len();
            if found < len {
                let problem = format!("it has {found} bytes, and {len} were saved");
                return Err(Error::io(FIND, &path)(io::Error::other(problem)));
            }
        }
        Ok(())
    }
}

/// Merges the entries of all shares, sorted by name.
fn merged(shares: impl IntoIterator<Item = Share>) -> Result<Vec<Entry>> {
    let mut entries: Vec<_> = shares.into_iter().flat_map(|share| share.entries).collect();
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
        Some(pair) => Err(unwritable(Some(&pair[0].name), "two processes have saved it")),
        None => Ok(entries),
    }
}

/// What an error says of the files of other processes.
const FIND: &str = "find what another process has saved in";

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
    /// the way to it, with dots between them, and so does anything else that is no dict, or is a list without dicts and
    /// tensors. Empty dicts, which Python leaves out, are noted for readers of this crate. The tensors refer to the
    /// storages by their numbers, and each is the whole of its storage in row-major order.
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
        let entry = Entry { name, path, kind, file: name_of(u64::MAX, u64::MAX), start, len };
        self.entries.push((entry, Archive { pickle, storage }));
        Ok(())
    }

    /// Saves to a folder, which is created unless it exists. A folder that exists is replaced: its index is, as a whole
    /// or not at all, and the files that only the old index names are removed afterwards. So a crash at any point
    /// leaves the old checkpoint or the complete new one; of a new folder it can leave files without an index, see
    /// [`remove_leftover`].
    ///
    /// # Errors
    ///
    /// Those of [`atomic::replace`]; [`Error::Io`] for a folder without an index that has other files.
    pub fn save(&self, folder: impl AsRef<Path>) -> Result<Replaced> {
        let begun = SharedSave::begin(folder)?;
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
    /// Those of [`atomic::replace`]. No file is left then.
    pub fn save_share(&self, save: &SharedSave, rank: u64) -> Result<Share> {
        let file = name_of(rank, save.number);
        let path = save.folder.join(&file);
        let (mut entries, has_data) = (Vec::new(), self.entries.iter().any(has_data));
        if !has_data {
            entries.extend(self.entries.iter().map(|(entry, _)| entry.clone()));
            return Ok(Share { entries });
        }
        let replaced = atomic::replace(&path, &mut |out| {
            entries = self.write_to(out, &file)?;
            Ok(())
        })?;
        match replaced {
            Replaced::Durable => Ok(Share { entries }),
            Replaced::Uncertain { action, path, cause } => {
                // The index must not survive a power loss without it.
                drop(fs::remove_file(&path));
                Err(Error::Io { action, path, cause })
            }
        }
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

fn unwritable(name: Option<&str>, problem: impl Into<String>) -> Error {
    Error::Unwritable { entry: name.map(str::to_owned), problem: problem.into() }
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

/// Makes the index, with the checksum after it.
fn index_of(entries: &[Entry], limits: &Limits) -> Result<Vec<u8>> {
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

/// Creates the folder. Returns whether it did not exist. A folder that exists must be a checkpoint, the leftover of one,
/// or empty.
fn make(folder: &Path) -> Result<bool> {
    match fs::metadata(folder) {
        Ok(found) if !found.is_dir() => {
            let cause = io::Error::new(ErrorKind::NotADirectory, "it is a file");
            return Err(Error::io("replace", folder)(cause));
        }
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let above = folder.parent().unwrap_or(folder);
            // As for a file, the folder that it is in must exist.
            fs::metadata(above).map_err(Error::io("open the folder", above))?;
            atomic::create_folder(folder)?;
            return Ok(true);
        }
        Err(error) => return Err(Error::io("open", folder)(error)),
    }
    if !is_whole(folder) {
        for name in names(folder)? {
            if !is_ours(&name) {
                let problem = format!(
                    "it is no checkpoint, and has other files, such as `{}`; choose another folder",
                    shown(&name)
                );
                let cause = io::Error::new(ErrorKind::InvalidInput, problem);
                return Err(Error::io("replace", folder)(cause));
            }
        }
        // The process that has created it may have ended before its name was on the disk.
        let found = fs::canonicalize(folder).map_err(Error::io("open", folder))?;
        atomic::sync_folder(found.parent().unwrap_or(&found))?;
    }
    Ok(false)
}

/// Returns the names in a folder. Those that are not UTF-8 are shown with replacement characters.
fn names(folder: &Path) -> Result<Vec<String>> {
    let name =
        |entry: io::Result<fs::DirEntry>| Ok(entry?.file_name().to_string_lossy().into_owned());
    let names = fs::read_dir(folder).and_then(|entries| entries.map(name).collect());
    names.map_err(Error::io("list", folder))
}

/// Returns whether a name is that of an index, of a file with entries, or of a temporary file of one of them.
fn is_ours(name: &str) -> bool {
    let is_one = |name: &str| name == INDEX || numbers(name).is_some();
    is_one(name) || name == UNFINISHED_INDEX || atomic::replaced(name).is_some_and(is_one)
}

/// Returns a number that no file in the folder has, nor one that another process still writes.
fn next_number(folder: &Path) -> Result<u64> {
    let names = names(folder)?;
    let taken = names.iter().filter_map(|name| numbers(atomic::replaced(name).unwrap_or(name)));
    let Some((rank, last)) = taken.max_by_key(|(_, number)| *number) else { return Ok(0) };
    last.checked_add(1).ok_or_else(|| {
        let problem = format!("there is no number after that of `{}`", name_of(rank, last));
        Error::io("name a file in", folder)(io::Error::other(problem))
    })
}

/// Removes the files that the index does not name, and what killed saves have left of temporary ones, if they were last
/// written to at least `age` ago. Returns how many there were.
fn remove_others(folder: &Path, kept: &HashSet<String>, age: Duration) -> Result<usize> {
    let mut removed = 0;
    for name in names(folder)? {
        let is_one = name == UNFINISHED_INDEX || numbers(&name).is_some();
        if is_one && !kept.contains(&name) {
            removed += usize::from(atomic::remove_if_old(&folder.join(name), age)?);
        }
    }
    Ok(removed + atomic::remove_leftovers(folder, age, is_ours)?)
}

/// Removes what killed saves have left in a folder that has an index. Returns whether there was anything.
fn remove_leftovers_within(folder: &Path, age: Duration) -> Result<bool> {
    let files: HashSet<_> =
        names(folder)?.into_iter().filter(|name| numbers(name).is_some()).collect();
    let saves: HashSet<_> = files.iter().filter_map(|name| numbers(name)).map(|it| it.1).collect();
    let kept = match saves.len() {
        // They are of one save, that of the index, which need not be read.
        0 | 1 => files,
        _ => {
            // Otherwise a power loss could bring back an index that names others.
            atomic::sync_folder(folder)?;
            // Nothing is known of the files of an index that cannot be read.
            super::read::files_of(folder).unwrap_or(files)
        }
    };
    Ok(remove_others(folder, &kept, age)? > 0)
}

fn remove_file(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(Error::io("remove", path)),
    }
}

/// Returns whether a folder is one whose save has finished: whether it has an index.
pub fn is_whole(folder: &Path) -> bool {
    folder.join(INDEX).is_file()
}

/// Removes a checkpoint that is a folder: its index first, so that what a crash leaves is no checkpoint. Other files in
/// the folder, and then the folder itself, are left alone.
///
/// # Errors
///
/// [`Error::Io`], if there is no such folder as well.
pub fn remove(folder: &Path) -> Result<()> {
    let names = names(folder)?;
    remove_file(&folder.join(INDEX))?;
    atomic::sync_folder(folder)?;
    for name in names.iter().filter(|name| is_ours(name)) {
        remove_file(&folder.join(name))?;
    }
    match fs::remove_dir(folder) {
        Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => Ok(()),
        removed => removed.map_err(Error::io("remove", folder)),
    }
}

/// Removes what a killed save has left: a folder without an index in which nothing was written for `age`, or, in one
/// with an index, the files that this does not name and that were not written to for `age`. Returns whether there was
/// anything. Files and symbolic links in the place of the folder are left alone. A save that still runs writes more
/// often than every few minutes.
///
/// # Errors
///
/// [`Error::Io`] if the folder cannot be listed, or a file in it cannot be inspected or removed.
pub fn remove_leftover(folder: &Path, age: Duration) -> Result<bool> {
    match fs::symlink_metadata(folder) {
        Ok(found) if found.is_dir() => {}
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(Error::io("inspect", folder)(error));
        }
        _ => return Ok(false),
    }
    match remove_leftover_folder(folder, age) {
        // Another process has removed it meanwhile.
        Err(Error::Io { cause, .. }) if cause.kind() == ErrorKind::NotFound => Ok(false),
        removed => removed,
    }
}

fn remove_leftover_folder(folder: &Path, age: Duration) -> Result<bool> {
    if is_whole(folder) {
        return remove_leftovers_within(folder, age);
    }
    let names = names(folder)?;
    let files = names.iter().map(|name| folder.join(name)).chain([folder.to_owned()]);
    for path in files {
        let modified = match fs::symlink_metadata(&path).and_then(|found| found.modified()) {
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            modified => modified.map_err(Error::io("inspect", &path))?,
        };
        // A time in the future does not count as old.
        if !modified.elapsed().is_ok_and(|elapsed| elapsed >= age) {
            return Ok(false);
        }
    }
    if !names.iter().all(|name| is_ours(name)) {
        return Ok(false);
    }
    remove(folder)?;
    Ok(true)
}

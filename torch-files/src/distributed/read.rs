//! Opening a folder. Nothing is executed, and everything in a folder is bounded: a piece is refused that is not where
//! the index says, of another shape or dtype than the index says, or that overlaps another one in its file.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::ErrorKind;
use std::path::{Component, Path};
use std::sync::Arc;

use super::{FolderKind, INDEX, MARK, trailer};
use crate::dtype::Dtype;
use crate::error::{Error, Malformed, Result};
use crate::limits::Limits;
use crate::pickle;
use crate::place::{Gathered, Piece, Place, joined};
use crate::source::{Cursor, Region, Source, Sum, newest};
use crate::text::shown;
use crate::torch::{self, PICKLE};
use crate::value::{MAX_DIMS, TensorRef, Text, Value};

/// The limits of the archive of a piece, which holds one tensor. A tensor of 64 dimensions takes some 300 values.
const OF_PIECE: Limits = Limits {
    max_pickle_bytes: 1 << 16,
    max_values: 1 << 12,
    max_tensors: 4,
    max_records: 16,
    max_expanded_bytes: 0,
    ..Limits::DEFAULT
};

/// The content of a folder.
pub(crate) struct Opened {
    /// The index.
    pub(crate) source: Source,
    pub(crate) value: Value,
    pub(crate) storages: BTreeMap<Text, Place>,
    pub(crate) regions: Vec<(Arc<Source>, Region)>,
}

type Step<T> = Result<T, Malformed>;

fn refuse<T>(problem: impl Into<String>) -> Step<T> {
    Err(Malformed::Whole(format!("its index `{INDEX}` {}", problem.into())))
}

/// Opens a folder. Its files are opened at once, so that it may be replaced afterwards.
pub(crate) fn open(folder: &Path, limits: &Limits) -> Result<Opened> {
    let path = folder.join(INDEX);
    let index = || {
        let source = match Source::open_as(&path, folder) {
            Err(Error::Io { cause, .. }) if cause.kind() == ErrorKind::NotFound => {
                return Err(without_index(folder, cause));
            }
            source => source?,
        };
        let bytes =
            source.all(limits.max_pickle_bytes).map_err(|malformed| malformed.at(folder))?;
        Ok((source, bytes))
    };
    newest(&index, &|_| true, &mut |source, bytes| {
        let read = Reader::read(folder, bytes, limits).map_err(|malformed| malformed.at(folder));
        read.map(|(value, storages, regions)| Opened { source, value, storages, regions })
    })
}

/// Returns the names of the files that the index of a folder names.
pub(super) fn files_of(folder: &Path) -> Result<HashSet<String>> {
    let limits = Limits::DEFAULT;
    let source = Source::open_as(&folder.join(INDEX), folder)?;
    let read = || {
        let bytes = source.all(limits.max_pickle_bytes)?;
        let (index, len) = pickle::read_index(&bytes, &limits)?;
        check_trailer(&bytes[..len], &bytes[len..])?;
        let Some(Value::Dict(items)) = index.get("storage_data") else {
            return refuse("does not say where its tensors are");
        };
        let name =
            |(_, info): &(Value, Value)| match info.get("relative_path").and_then(Value::text) {
                Some(name) => Ok(name.to_owned()),
                None => refuse("has a place without a name or a file"),
            };
        items.iter().map(name).collect()
    };
    read().map_err(|malformed: Malformed| malformed.at(folder))
}

/// Makes the error of a folder that has no index.
fn without_index(folder: &Path, cause: std::io::Error) -> Error {
    let names =
        |entry: std::io::Result<std::fs::DirEntry>| entry.ok()?.file_name().into_string().ok();
    let names: Vec<_> = std::fs::read_dir(folder)
        .map(|entries| entries.filter_map(names).collect())
        .unwrap_or_default();
    if names.iter().any(|name| is_index_of_rank(name)) {
        let problem = "each rank has saved its part alone, with `use_collectives=False`, which torch-files does not \
                       read: save with `use_collectives=True`";
        return Malformed::Whole(problem.to_owned()).at(folder);
    }
    if names.iter().any(|name| FolderKind::Distcp.numbers(name).is_some()) {
        let problem = format!("it has no index `{INDEX}`, so that its save has not finished");
        return Malformed::Whole(problem).at(folder);
    }
    Error::Io { action: "open", path: folder.join(INDEX), cause }
}

/// Returns whether a name is `__RANK.metadata`.
pub(super) fn is_index_of_rank(name: &str) -> bool {
    let rank = name.strip_prefix("__").and_then(|name| name.strip_suffix(INDEX));
    rank.is_some_and(|rank| rank.parse::<u64>().is_ok())
}

/// A name in the index.
struct Named {
    name: Text,
    path: Vec<Value>,
    what: What,
}

enum What {
    /// A tensor, with the offsets and sizes of its pieces.
    Tensor {
        dtype: Option<Dtype>,
        shape: Vec<i64>,
        pieces: Vec<(Vec<i64>, Vec<i64>)>,
    },
    Object,
    Empty,
    Opaque(Text),
}

/// Where the archive of a piece or an object is.
#[derive(Clone, Copy, Debug)]
struct Stored {
    file: usize,
    start: u64,
    len: u64,
}

/// The name of an object, or of a tensor and where its piece begins.
type Key = (Text, Option<Vec<i64>>);

type Content = (Value, BTreeMap<Text, Place>, Vec<(Arc<Source>, Region)>);

/// Reads the files of a folder.
struct Reader<'a> {
    limits: Limits,
    files: Vec<Arc<Source>>,
    stored: HashMap<Key, Stored>,
    storages: BTreeMap<Text, Place>,
    regions: Vec<(Arc<Source>, Region)>,
    folder: &'a Path,
}

impl<'a> Reader<'a> {
    fn read(folder: &'a Path, index: &[u8], limits: &Limits) -> Step<Content> {
        let (value, len) = pickle::read_index(index, limits)?;
        check_trailer(&index[..len], &index[len..])?;
        let index = value;
        let mut reader = Self {
            limits: limits.clone(),
            files: Vec::new(),
            stored: HashMap::new(),
            storages: BTreeMap::new(),
            regions: Vec::new(),
            folder,
        };
        let named = named(&index, limits)?;
        reader.open_files(&index)?;
        drop(index);
        let mut leaves = Vec::with_capacity(named.len());
        for Named { name, path, what } in named {
            let value = match what {
                What::Tensor { dtype, shape, pieces } => {
                    reader.tensor(&name, dtype, shape, pieces)?
                }
                What::Object => reader.object(&name)?,
                What::Empty => Value::Dict(Vec::new()),
                What::Opaque(what) => Value::Opaque(what),
            };
            leaves.push((path, value));
        }
        let Self { storages, regions, .. } = reader;
        Ok((nested(leaves, limits.max_depth)?, storages, regions))
    }

    /// Opens the files that the index names, and notes where the pieces and the objects are.
    fn open_files(&mut self, index: &Value) -> Step<()> {
        let Some(Value::Dict(items)) = index.get("storage_data") else {
            return refuse("does not say where its tensors are");
        };
        let all = items.iter().filter_map(|(_, info)| info.get("relative_path")?.text());
        let all = all.collect::<HashSet<_>>().len();
        let mut names = HashMap::new();
        let mut spans = Vec::with_capacity(items.len());
        for (key, info) in items {
            let (Some(name), Some(file)) =
                (text_of(key, "fqn"), info.get("relative_path").and_then(Value::text))
            else {
                return refuse("has a place without a name or a file");
            };
            if has_transforms(info) {
                return refuse(format!("has `{}` compressed or otherwise changed", shown(&name)));
            }
            let offset = match key.get("offset") {
                None | Some(Value::None) => None,
                Some(offset) => Some(sizes_of(offset)?),
            };
            let file = match names.get(file) {
                Some(&file) => file,
                None => {
                    self.files.push(self.open_file(file, all)?);
                    names.insert(file.to_owned(), self.files.len() - 1);
                    self.files.len() - 1
                }
            };
            let number = |name: &str| match info.get(name) {
                Some(Value::Int(number)) => u64::try_from(*number).ok(),
                _ => None,
            };
            let range = number("offset").zip(number("length"));
            let end = range.and_then(|(start, len)| start.checked_add(len));
            let (Some((start, len)), Some(end)) = (range, end) else {
                return refuse("has a place without an offset and a length");
            };
            if end > self.files[file].len() {
                let problem = "it ends before its last entry".to_owned();
                return Err(Malformed::Read(self.files[file].malformed(problem)));
            }
            spans.push((file, start, end));
            let stored = Stored { file, start, len };
            if self.stored.insert((name, offset), stored).is_some() {
                return refuse("has two places for one name");
            }
        }
        // Otherwise a small folder could ask for the same large archive again and again.
        spans.sort_unstable();
        let overlap = |pair: &[(usize, u64, u64)]| pair[0].0 == pair[1].0 && pair[0].2 > pair[1].1;
        if spans.windows(2).any(overlap) {
            return refuse("has places that overlap");
        }
        Ok(())
    }

    /// Opens one of so many files.
    fn open_file(&self, name: &str, all: usize) -> Step<Arc<Source>> {
        let mut parts = Path::new(name).components();
        let is_one = matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None));
        // Messages about the file show its path.
        if !is_one || shown(name) != name {
            return refuse(format!("has `{}`, which is not the name of a file", shown(name)));
        }
        if self.files.len() >= self.limits.max_records {
            return Err(Malformed::TooMuch {
                what: "files",
                limit: self.limits.max_records as u64,
            });
        }
        let source = Source::open_one_of(&self.folder.join(name), all);
        Ok(Arc::new(source.map_err(Malformed::Read)?))
    }

    /// Opens the archive of a piece or an object. Returns what is in it, and its storages, after the source.
    fn archive(
        &mut self,
        name: &Text,
        key: &Key,
        limits: &Limits,
    ) -> Step<(Arc<Source>, u64, torch::Opened)> {
        let Some(Stored { file, start, len }) = self.stored.remove(key) else {
            return refuse(format!("does not say where `{}` is", shown(name)));
        };
        let source = Arc::clone(&self.files[file]);
        let opened = torch::open(Cursor::within(&source, start, len), limits);
        let mut opened = opened.map_err(|malformed| match malformed {
            Malformed::TooMuch { .. } => malformed,
            other => Malformed::Read(match other.at(source.path()) {
                Error::Malformed { path, offset, problem, .. } => {
                    let (entry, problem) =
                        (Some(name.to_string()), format!("in `{}`: {problem}", shown(name)));
                    Error::Malformed { path, entry, offset, problem }
                }
                error => error,
            }),
        })?;
        let storages = opened.storages.iter_mut().map(|(_, record)| record);
        for record in storages.chain(opened.others.values_mut()) {
            record.offset += start;
            let region = Region {
                name: name.to_string(),
                offset: record.offset,
                len: record.len,
                sum: Sum::Crc32(record.crc32),
            };
            self.regions.push((Arc::clone(&source), region));
        }
        Ok((source, start, opened))
    }

    /// Makes a tensor of its pieces.
    fn tensor(
        &mut self,
        name: &Text,
        dtype: Option<Dtype>,
        shape: Vec<i64>,
        pieces: Vec<(Vec<i64>, Vec<i64>)>,
    ) -> Step<Value> {
        let wrong =
            |problem: &str| Malformed::Tensor { storage: shown(name), problem: problem.to_owned() };
        let Some(dtype) = dtype else {
            return Ok(Value::Opaque("a tensor of a dtype that torch-files does not have".into()));
        };
        let whole = TensorRef::contiguous(Text::clone(name), dtype, shape);
        let mut found = Vec::with_capacity(pieces.len());
        for (offsets, sizes) in pieces {
            let key = (Text::clone(name), Some(offsets));
            // Python may list ranks that have nothing of a tensor.
            if sizes.contains(&0) && !self.stored.contains_key(&key) {
                continue;
            }
            let (source, _, opened) = self.archive(name, &key, &OF_PIECE)?;
            let Value::Tensor(tensor) = opened.root else {
                if let Value::Opaque(what) = opened.root {
                    return Ok(Value::Opaque(what));
                }
                return Err(wrong("has a piece that is not a tensor"));
            };
            if tensor.dtype != dtype || tensor.shape != sizes {
                return Err(wrong("has a piece of another shape or dtype than its index says"));
            }
            if sizes.contains(&0) {
                continue;
            }
            let Some(record) = opened.storages.get(&tensor.storage) else {
                return Err(wrong("has a piece without elements"));
            };
            let unsigned = |sizes: Vec<i64>| sizes.into_iter().map(i64::unsigned_abs).collect();
            let piece = Piece {
                offsets: unsigned(key.1.unwrap_or_default()),
                sizes: unsigned(sizes),
                tensor: *tensor,
                source,
                start: record.offset,
                gathered: Gathered::default(),
            };
            found.push((piece, record.len));
        }
        let (tensor, place) = joined(whole, found).map_err(wrong)?;
        self.insert(Text::clone(name), place)?;
        Ok(tensor.into())
    }

    fn insert(&mut self, key: Text, place: Place) -> Step<()> {
        if self.storages.insert(key, place).is_some() {
            return refuse("has two storages of one name");
        }
        Ok(())
    }

    /// Reads an object. What it takes of the limits is not left for others.
    fn object(&mut self, name: &Text) -> Step<Value> {
        let limits = self.limits.clone();
        let (source, start, opened) = self.archive(name, &(Text::clone(name), None), &limits)?;
        let torch::Opened { mut root, arrays, storages, others } = opened;
        let key_of = |key: &str| Text::from(format!("{name}\n{key}"));
        let pickle = others.get(PICKLE).map_or(start, |record| record.offset);
        for (key, record) in storages {
            self.insert(key_of(&key), Place::in_file(&source, record.offset, record.len))?;
        }
        for (key, bytes) in arrays {
            let len = bytes.len();
            let place = match bytes {
                pickle::Bytes::Here(range) => {
                    Place::in_file(&source, pickle + range.start as u64, len)
                }
                pickle::Bytes::Made(made) => Place::in_file(&made, 0, len),
            };
            self.insert(key_of(&key), place)?;
        }
        let mut expanded = 0u64;
        let mut tensors = 0;
        root.for_each_tensor(&mut |tensor| {
            tensor.storage = key_of(&tensor.storage);
            let len = self.storages.get(&tensor.storage).map_or(0, |place| place.len);
            expanded = expanded.saturating_add(tensor.check(len).unwrap_or(u64::MAX));
            tensors += 1;
        });
        let Limits { max_values, max_tensors, max_expanded_bytes, .. } = &mut self.limits;
        for (left, taken, what) in [
            (max_values, count(&root), "values"),
            (max_tensors, tensors, "tensors"),
            (max_expanded_bytes, expanded, "bytes of expanded tensors"),
        ] {
            let limit = *left;
            *left = left.checked_sub(taken).ok_or(Malformed::TooMuch { what, limit })?;
        }
        Ok(root)
    }
}

/// Checks what follows the pickle of an index: nothing, or the checksum that this crate has written.
fn check_trailer(pickle: &[u8], rest: &[u8]) -> Step<()> {
    match rest {
        [] => Ok(()),
        // A fuzzer cannot guess checksums.
        rest if rest == trailer(pickle) || cfg!(fuzzing) && rest.starts_with(MARK) => Ok(()),
        _ => refuse("is damaged: its checksum does not match"),
    }
}

/// Reads the names in an index, what they are, and the ways to them.
fn named<'a>(index: &'a Value, limits: &Limits) -> Step<Vec<Named>> {
    let Some(Value::Dict(items)) = index.get("state_dict_metadata") else {
        return refuse("is not one of torch.distributed.checkpoint");
    };
    if items.len() as u64 > limits.max_tensors {
        return Err(Malformed::TooMuch { what: "tensors and objects", limit: limits.max_tensors });
    }
    let mut paths = HashMap::new();
    if let Some(Value::Dict(items)) = index.get("planner_data") {
        let path = |(name, path): &'a (Value, Value)| match (name, path) {
            (Value::Text(name), Value::Tuple(path)) => Some((name, path)),
            _ => None,
        };
        paths = items.iter().filter_map(path).collect();
    }
    let mut all = Vec::with_capacity(items.len());
    for (key, value) in items {
        let Value::Text(name) = key else { return refuse("has a name that is not a text") };
        let path = match paths.remove(name) {
            Some(path) if !path.is_empty() => path.to_vec(),
            _ => vec![key.clone()],
        };
        let what = match value {
            Value::Opaque(what) => What::Opaque(Text::clone(what)),
            value => match (value.get("size"), value.get("chunks")) {
                (Some(size), Some(Value::List(chunks))) => {
                    let piece = |chunk: &Value| {
                        let sizes = |name: &str| {
                            chunk
                                .get(name)
                                .map_or_else(|| refuse("has a piece without sizes"), sizes_of)
                        };
                        Ok((sizes("offsets")?, sizes("sizes")?))
                    };
                    let pieces = chunks.iter().map(piece).collect::<Step<_>>()?;
                    What::Tensor { dtype: dtype_of(value), shape: sizes_of(size)?, pieces }
                }
                (None, None) => What::Object,
                _ => return refuse("has a tensor without sizes or pieces"),
            },
        };
        all.push(Named { name: Text::clone(name), path, what });
    }
    // Of an empty dict there is the path alone.
    let empty = paths.into_iter().filter(|(_, path)| !path.is_empty()).map(|(name, path)| Named {
        name: Text::clone(name),
        path: path.clone(),
        what: What::Empty,
    });
    all.extend(empty);
    Ok(all)
}

/// Returns the dtype in the properties of a tensor, of which it is the first, if this crate has it.
fn dtype_of(tensor: &Value) -> Option<Dtype> {
    let dtype = match tensor.get("properties")? {
        Value::Tuple(items) => items.first()?,
        properties => properties.get("dtype")?,
    };
    Dtype::named(dtype.text()?.strip_prefix("torch.")?)
}

/// Returns the numbers of a `torch.Size`.
fn sizes_of(value: &Value) -> Step<Vec<i64>> {
    let (Value::Tuple(items) | Value::List(items)) = value else {
        return refuse("has sizes that are not a tuple");
    };
    if items.len() > MAX_DIMS {
        return refuse("has a tensor of more than 64 dimensions");
    }
    let number = |item: &Value| match item {
        Value::Int(number) if *number >= 0 => Ok(*number),
        _ => refuse("has sizes that are not counts"),
    };
    items.iter().map(number).collect()
}

fn text_of(value: &Value, name: &str) -> Option<Text> {
    match value.get(name)? {
        Value::Text(text) => Some(Text::clone(text)),
        _ => None,
    }
}

/// Returns whether what is in a file must be transformed before it can be read, such as decompressed.
fn has_transforms(info: &Value) -> bool {
    match info.get("transform_descriptors") {
        None | Some(Value::None) => false,
        Some(Value::List(items) | Value::Tuple(items)) => !items.is_empty(),
        Some(_) => true,
    }
}

/// Counts the values in one.
fn count(value: &Value) -> u64 {
    1 + match value {
        Value::List(items) | Value::Tuple(items) => items.iter().map(count).sum(),
        Value::Dict(items) => items.iter().map(|(key, item)| count(key) + count(item)).sum(),
        Value::Tensor(tensor) => 12 + 2 * tensor.shape.len() as u64,
        _ => 0,
    }
}

/// Makes nested dicts and lists of values, given the keys and places on the way to each.
fn nested(leaves: Vec<(Vec<Value>, Value)>, depth: usize) -> Step<Value> {
    let leaves = leaves.into_iter().map(|(path, value)| (path.into_iter(), value)).collect();
    children(leaves, depth)
}

type Leaf = (std::vec::IntoIter<Value>, Value);

/// Makes a dict or a list of what is below one place. Each path has a next item.
fn children(leaves: Vec<Leaf>, depth: usize) -> Step<Value> {
    let Some(depth) = depth.checked_sub(1) else {
        return refuse("has values that are nested too deep");
    };
    let mut places: HashMap<Text, usize> = HashMap::new();
    let mut below: Vec<(Value, Vec<Leaf>)> = Vec::new();
    for (mut path, value) in leaves {
        let Some(item) = path.next() else {
            return refuse("has a name that is a part of another one");
        };
        let key = match &item {
            Value::Text(key) => Text::from(format!("'{key}")),
            Value::Int(place) => place.to_string().into(),
            _ => return refuse("has a name that is neither a text nor a number"),
        };
        let place = *places.entry(key).or_insert_with(|| {
            below.push((item, Vec::new()));
            below.len() - 1
        });
        below[place].1.push((path, value));
    }
    drop(places);
    if below.iter().all(|(key, _)| matches!(key, Value::Int(_))) {
        below.sort_by_key(|(key, _)| if let Value::Int(place) = key { *place } else { 0 });
    }
    let mut items = Vec::with_capacity(below.len());
    for (key, mut leaves) in below {
        let is_value = matches!(&leaves[..], [(path, _)] if path.len() == 0);
        let value = match leaves.pop() {
            Some((_, value)) if is_value => value,
            last => children(leaves.into_iter().chain(last).collect(), depth)?,
        };
        items.push((key, value));
    }
    let in_order = |(place, (key, _)): (usize, &(Value, Value))| *key == Value::Int(place as i64);
    Ok(match !items.is_empty() && items.iter().enumerate().all(in_order) {
        true => Value::List(items.into_iter().map(|(_, item)| item).collect()),
        false => Value::Dict(items),
    })
}

//! Reading safetensors shards: files of which each has tensors, or pieces of them, and says in its metadata where each
//! piece begins in the whole tensor. Python's `HuggingFaceStorageWriter` writes them.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;
use std::fs;
use std::path::Path;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

use crate::error::{Error, Malformed, Result};
use crate::limits::Limits;
use crate::place::{Backing, Gathered, NOT_ALL, Piece, Place, joined};
use crate::safetensors::Shape;
use crate::text::shown;
use crate::value::{TensorRef, Text, Value};

/// The entry of the metadata that says where the tensors of a file begin: JSON such as
/// `{"weight": {"saved_offsets": [4, 0]}}`.
pub(crate) const SHARDING: &str = "DCP_SHARDING_INFO";

/// How the names of shards begin, and how those of all safetensors files end.
pub(crate) const PREFIX: &str = "shard-";
const ENDING: &str = ".safetensors";

/// Returns the names of the files in a folder that can be shards, sorted.
pub(crate) fn shards_in(folder: &Path, limits: &Limits) -> Result<Vec<String>> {
    let failed = Error::io("list", folder);
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(&failed)? {
        let name = entry.map_err(&failed)?.file_name();
        let Some(name) = name.to_str().filter(|name| name.ends_with(ENDING)) else { continue };
        // Messages about the file show its path.
        if shown(name) != name {
            let problem = format!("it has a file with the name `{}`", shown(name));
            return Err(Malformed::Whole(problem).at(folder));
        }
        if names.len() >= limits.max_records {
            let limit = limits.max_records as u64;
            return Err(Malformed::TooMuch { what: "files", limit }.at(folder));
        }
        names.push(name.to_owned());
    }
    names.sort_unstable();
    Ok(names)
}

/// Returns where the tensors of a file begin, as its metadata say; `None` for a file that is no shard.
pub(crate) fn sharding_of(metadata: &BTreeMap<String, String>) -> Option<&str> {
    metadata.get(SHARDING).map(String::as_str).filter(|text| !text.is_empty())
}

/// Returns whether a file has a piece of a tensor that is not its first, as the text says that [`sharding_of`] returns.
pub(crate) fn has_later_pieces(sharding: &str) -> bool {
    serde_json::Deserializer::from_str(sharding).deserialize_map(AnyLater).unwrap_or(false)
}

/// A tensor of one file: a piece of a tensor, unless it is the whole.
struct Part {
    file: usize,
    offsets: Vec<i64>,
    what: Found,
}

enum Found {
    Tensor(TensorRef, Place),
    Opaque(Text),
}

/// The tensors of several shards.
#[derive(Default)]
pub(crate) struct Shards {
    files: Vec<String>,
    parts: BTreeMap<Text, Vec<Part>>,
}

/// A tensor of several shards, the key of its storage and where that is; or what is there in its place.
pub(crate) type Joined = (Value, Option<(Text, Place)>);

impl Shards {
    /// Adds the tensors of a file, given what [`sharding_of`] returns.
    pub(crate) fn add(
        &mut self,
        file: &str,
        sharding: &str,
        tensors: Vec<(Value, Value)>,
        places: &BTreeMap<Text, Place>,
    ) -> Result<(), Malformed> {
        let names = tensors.iter().filter_map(|(name, _)| name.text()).collect();
        let refuse = |problem: String| Malformed::Whole(format!("its `{SHARDING}`: {problem}"));
        let mut json = serde_json::Deserializer::from_str(sharding);
        let offsets = OffsetsSeed(&names).deserialize(&mut json);
        let offsets = offsets.and_then(|offsets| json.end().map(|()| offsets));
        let mut offsets = offsets.map_err(|error| refuse(error.to_string()))?;
        self.files.push(file.to_owned());
        for (name, value) in tensors {
            let Value::Text(name) = name else { continue };
            let Some(offsets) = offsets.remove(&*name) else {
                return Err(refuse(format!("it does not say where `{}` begins", shown(&name))));
            };
            let what = match value {
                Value::Tensor(tensor) => match places.get(&tensor.storage) {
                    Some(place) => Found::Tensor(*tensor, place.clone()),
                    None => continue,
                },
                Value::Opaque(what) => Found::Opaque(what),
                _ => continue,
            };
            let file = self.files.len() - 1;
            self.parts.entry(name).or_default().push(Part { file, offsets, what });
        }
        Ok(())
    }

    /// Returns whether a file that was added has this tensor.
    pub(crate) fn has(&self, name: &str, file: &str) -> bool {
        let is_there = |part: &Part| self.files[part.file] == file;
        self.parts.get(name).is_some_and(|parts| parts.iter().any(is_there))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Fails if the files are of several saves in one folder without an index: Python numbers those of one from 1 to
    /// the same number, and leaves others that are there.
    pub(crate) fn check_one_save(&self) -> Result<(), Malformed> {
        let numbered = self.files.iter().filter_map(|name| Some((name, number_of_files(name)?)));
        let numbered: Vec<_> = numbered.collect();
        let Some(pair) = numbered.windows(2).find(|pair| pair[0].1 != pair[1].1) else {
            return Ok(());
        };
        let [one, other] = [&pair[0], &pair[1]].map(|(name, _)| shown(name));
        Err(Malformed::Whole(format!(
            "`{one}` and `{other}` in it are of two saves; remove the files of the older one"
        )))
    }

    /// Returns the names of all tensors.
    pub(crate) fn names(&self) -> Vec<Text> {
        self.parts.keys().map(Text::clone).collect()
    }

    /// Takes a tensor, which is made of all its pieces.
    pub(crate) fn take(&mut self, name: &str) -> Result<Option<Joined>, Malformed> {
        let Some((name, parts)) = self.parts.remove_entry(name) else { return Ok(None) };
        let wrong = |problem: String| Malformed::Tensor { storage: shown(&name), problem };
        let key = parts.first().map(|part| format!("{}/{name}", self.files[part.file]));
        let shape = shape_of(&parts).map_err(|problem| wrong(problem.to_owned()))?;
        let (mut dtype, mut seen, mut pieces) = (None, HashSet::new(), Vec::new());
        for Part { offsets, what, .. } in parts {
            let (tensor, place) = match what {
                Found::Tensor(tensor, place) => (tensor, place),
                Found::Opaque(what) => return Ok(Some((Value::Opaque(what), None))),
            };
            if *dtype.get_or_insert(tensor.dtype) != tensor.dtype {
                return Err(wrong("has pieces of different dtypes".to_owned()));
            }
            let Backing::File { source, offset } = place.backing else { continue };
            let unsigned = |sizes: &[i64]| sizes.iter().map(|size| size.unsigned_abs()).collect();
            let (offsets, sizes): (Vec<_>, Vec<_>) = (unsigned(&offsets), unsigned(&tensor.shape));
            // Several ranks may have the same piece.
            if sizes.contains(&0) || !seen.insert((offsets.clone(), sizes.clone())) {
                continue;
            }
            let gathered = Gathered::default();
            let piece = Piece { offsets, sizes, tensor, source, start: offset, gathered };
            pieces.push((piece, place.len));
        }
        let (Some(dtype), Some(key)) = (dtype, key) else { return Ok(None) };
        let whole = TensorRef::contiguous(key.as_str(), dtype, shape);
        let (tensor, place) = joined(whole, pieces).map_err(|problem| {
            let missing = if problem == NOT_ALL { self.missing() } else { String::new() };
            wrong(format!("{problem}{missing}"))
        })?;
        Ok(Some((tensor.into(), Some((key.into(), place)))))
    }

    /// Says that the file of a shard is missing, and which one if that is known.
    fn missing(&self) -> String {
        let mut ranks: BTreeMap<&str, BTreeSet<u64>> = BTreeMap::new();
        for name in &self.files {
            let numbered = name.strip_prefix(PREFIX).and_then(|rest| rest.split_once('-'));
            if let Some((Ok(rank), rest)) = numbered.map(|(rank, rest)| (rank.parse(), rest)) {
                ranks.entry(rest).or_default().insert(rank);
            }
        }
        // Between two that are there.
        let gap = ranks.iter().find_map(|(rest, ranks)| {
            let after = ranks.iter().map(|rank| rank.saturating_add(1));
            let gap = after.zip(ranks.iter().skip(1)).find(|(next, rank)| next < rank)?;
            Some(format!(", perhaps `shard-{:05}-{rest}`", gap.0))
        });
        format!("; a file with the rest of it is missing{}", gap.unwrap_or_default())
    }
}

/// Returns the last number in a name as Python gives it to a shard, `shard-RANK-model-FILE-of-FILES.safetensors`.
fn number_of_files(name: &str) -> Option<&str> {
    let (_, files) = name.strip_prefix(PREFIX)?.strip_suffix(ENDING)?.split_once("-of-")?;
    Some(files)
}

/// Returns the shape of a whole tensor, which reaches as far as its pieces do, as Python takes it.
fn shape_of(parts: &[Part]) -> Result<Vec<i64>, &'static str> {
    let mut shape: Option<Vec<i64>> = None;
    for Part { offsets, what, .. } in parts {
        let Found::Tensor(tensor, _) = what else { continue };
        if offsets.len() != tensor.shape.len() {
            return Err("has a piece that begins at a place of another number of dimensions");
        }
        let ends = offsets.iter().zip(&tensor.shape).map(|(at, size)| at.checked_add(*size));
        let ends: Option<Vec<_>> = ends.collect();
        let ends = ends.ok_or("has a piece that ends beyond what a tensor can have")?;
        let shape = shape.get_or_insert_with(|| ends.clone());
        if shape.len() != ends.len() {
            return Err("has pieces of different numbers of dimensions");
        }
        shape.iter_mut().zip(ends).for_each(|(size, end)| *size = end.max(*size));
    }
    Ok(shape.unwrap_or_default())
}

/// Where one tensor of a file begins.
#[derive(Deserialize)]
struct Saved {
    saved_offsets: Shape,
}

/// Reads whether any tensor begins elsewhere than at the first element of the whole one.
struct AnyLater;

impl<'de> Visitor<'de> for AnyLater {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of places")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<bool, A::Error> {
        let mut any = false;
        while let Some((IgnoredAny, saved)) = map.next_entry()? {
            let Saved { saved_offsets: Shape(offsets) } = saved;
            any |= offsets.iter().any(|at| *at != 0);
        }
        Ok(any)
    }
}

/// Reads where the tensors of a file with these names begin. Others are ignored, and take no memory.
struct OffsetsSeed<'a>(&'a HashSet<&'a str>);

impl<'de> DeserializeSeed<'de> for OffsetsSeed<'_> {
    type Value = HashMap<String, Vec<i64>>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for OffsetsSeed<'_> {
    type Value = HashMap<String, Vec<i64>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of places")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut offsets = HashMap::new();
        while let Some(name) = map.next_key::<String>()? {
            if !self.0.contains(name.as_str()) {
                let IgnoredAny = map.next_value()?;
                continue;
            }
            let Saved { saved_offsets: Shape(saved) } = map.next_value()?;
            match offsets.entry(name) {
                Entry::Vacant(entry) => drop(entry.insert(saved)),
                Entry::Occupied(entry) => {
                    let name = shown(entry.key());
                    return Err(A::Error::custom(format!("`{name}` occurs twice")));
                }
            }
        }
        Ok(offsets)
    }
}

//! The index of a model in several files, which says which file has which tensor, as Hugging Face's libraries write it:
//! `model.safetensors.index.json` or `pytorch_model.bin.index.json`.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Component, Path};

use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

use crate::error::Malformed;
use crate::limits::Limits;
use crate::source::Source;
use crate::text::shown;

/// The name of the index of a model in safetensors files.
pub(crate) const NAME: &str = "model.safetensors.index.json";

/// Returns whether a file that begins with these bytes can be an index: whether it is JSON. A safetensors file begins
/// with a length, whose last byte is zero.
pub(crate) fn is_index(start: &[u8]) -> bool {
    start.first() == Some(&b'{') && start.get(7) != Some(&0)
}

/// Reads the index: the names of the tensors by the file that has them.
pub(crate) fn read(
    source: &Source,
    limits: &Limits,
) -> Result<BTreeMap<String, Vec<String>>, Malformed> {
    let refuse = |problem: String| Malformed::Whole(problem);
    if source.len() > limits.max_header_bytes {
        return Err(refuse("it is too long for an index".to_owned()));
    }
    let mut json = vec![0; usize::try_from(source.len()).unwrap_or(0)];
    source.read_at(0, &mut json).map_err(Malformed::Read)?;
    let mut json = serde_json::Deserializer::from_slice(&json);
    let names = IndexSeed(limits.max_tensors).deserialize(&mut json);
    let names = names.and_then(|names| json.end().map(|()| names));
    let names = names.map_err(|error| refuse(format!("as the index of a model: {error}")))?;
    let mut files: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (name, file) in names {
        files.entry(file).or_default().push(name);
    }
    for file in files.keys() {
        let mut parts = Path::new(file).components();
        let is_one = matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None));
        // Messages about the file show its path.
        if !is_one || shown(file) != *file {
            return Err(refuse(format!("`{}` in it is not the name of a file", shown(file))));
        }
    }
    Ok(files)
}

/// Reads the file of each tensor from `weight_map`, of up to so many tensors.
struct IndexSeed(u64);

impl<'de> DeserializeSeed<'de> for IndexSeed {
    type Value = BTreeMap<String, String>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for IndexSeed {
    type Value = BTreeMap<String, String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("struct Index")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        const FIELD: &str = "weight_map";
        let mut files = None;
        while let Some(name) = map.next_key::<String>()? {
            if name != FIELD {
                let IgnoredAny = map.next_value()?;
            } else if files.replace(map.next_value_seed(FilesSeed(self.0))?).is_some() {
                return Err(A::Error::duplicate_field(FIELD));
            }
        }
        files.ok_or_else(|| A::Error::missing_field(FIELD))
    }
}

/// Reads the file of each tensor, of up to so many.
struct FilesSeed(u64);

impl<'de> DeserializeSeed<'de> for FilesSeed {
    type Value = BTreeMap<String, String>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for FilesSeed {
    type Value = BTreeMap<String, String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of the names of files")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut files = BTreeMap::new();
        while let Some((name, file)) = map.next_entry::<String, String>()? {
            if files.len() as u64 == self.0 {
                return Err(A::Error::custom(format!("more than {} tensors", self.0)));
            }
            if files.insert(name, file).is_some() {
                return Err(A::Error::custom("a tensor occurs twice"));
            }
        }
        Ok(files)
    }
}

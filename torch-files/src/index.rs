//! The index of a model in several files, which says which file has which tensor, as Hugging Face's libraries write it:
//! `model.safetensors.index.json` or `pytorch_model.bin.index.json`.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Component, Path};

use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

use crate::error::Malformed;
use crate::limits::Limits;
use crate::safetensors::{CHECKSUMS, MetadataSeed};
use crate::source::Checksum;
use crate::text::shown;

/// The name of the index of a model in safetensors files.
pub(crate) const NAME: &str = "model.safetensors.index.json";

/// Returns whether a file that begins with these bytes can be an index: whether it is JSON. A safetensors file begins
/// with a length, whose last byte is zero.
pub(crate) fn is_index(start: &[u8]) -> bool {
    start.first() == Some(&b'{') && start.get(7) != Some(&0)
}

/// What an index of this crate begins with, before its own checksum. What follows are lines of the checksums of the
/// headers of its files.
const START: &str = "{\"metadata\":{\"torch_files\":\"";

/// The length of a checksum as text.
const DIGITS: usize = 16;

/// The content of an index.
pub(crate) struct Index {
    /// The names of the tensors by the file that has them.
    pub(crate) files: BTreeMap<String, Vec<String>>,
    pub(crate) metadata: BTreeMap<String, String>,
    /// The checksums of the headers of the files, if this crate has written it.
    pub(crate) headers: Option<BTreeMap<String, Checksum>>,
}

/// Returns whether this crate has written an index.
pub(crate) fn is_ours(json: &[u8]) -> bool {
    json.starts_with(START.as_bytes())
}

/// Returns whether another program has written an index. What is no JSON is a damaged one of nobody knows whom.
pub(crate) fn is_of_another(json: &[u8]) -> bool {
    !is_ours(json) && serde_json::from_slice::<IgnoredAny>(json).is_ok()
}

/// Reads an index. What this crate has written is refused unless its checksum matches.
pub(crate) fn parse(json: &[u8], limits: &Limits) -> Result<Index, Malformed> {
    let refuse = |problem: String| Malformed::Whole(problem);
    // A fuzzer cannot guess checksums.
    if is_ours(json) && signed(json.to_vec()) != json && !cfg!(fuzzing) {
        return Err(refuse("as the index of a model: its checksum does not match".to_owned()));
    }
    let mut text = serde_json::Deserializer::from_slice(json);
    let read = IndexSeed(limits).deserialize(&mut text);
    let read = read.and_then(|read| text.end().map(|()| read));
    let (mut metadata, names) =
        read.map_err(|error| refuse(format!("as the index of a model: {error}")))?;
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
    // Another program may have something else by that name.
    let own = if is_ours(json) { metadata.remove(CHECKSUMS) } else { None };
    let headers = own.map(|own| {
        let line = |line: &str| {
            let (sum, file) = line.split_once("  ")?;
            Some((file.to_owned(), Checksum::parse(sum)?))
        };
        own.lines().skip(1).filter_map(line).collect()
    });
    Ok(Index { files, metadata, headers })
}

/// Puts the checksum of an index of this crate into it.
fn signed(mut json: Vec<u8>) -> Vec<u8> {
    let end = START.len() + DIGITS;
    if json.len() >= end {
        let sum = Checksum::of([START.as_bytes(), &json[end..]]).to_string();
        json[START.len()..end].copy_from_slice(sum.as_bytes());
    }
    json
}

/// The entry of the metadata that has the size in bytes of all tensors.
const TOTAL: &str = "total_size";

/// Returns a name of these texts that an index has for itself.
pub(crate) fn taken(texts: &BTreeMap<String, String>) -> Option<&'static str> {
    [CHECKSUMS, TOTAL].into_iter().find(|name| texts.contains_key(*name))
}

/// Makes an index of these texts as its metadata, of which it takes no name itself, the size in bytes of all tensors,
/// the checksums of the headers of the files, and the file of each tensor.
pub(crate) fn write(
    texts: &BTreeMap<String, String>,
    total: u64,
    headers: &BTreeMap<String, Checksum>,
    files: &BTreeMap<String, String>,
) -> Result<Vec<u8>, String> {
    let text = |text: &str| serde_json::to_string(text).map_err(|error| error.to_string());
    let line = |(file, sum): (&String, &Checksum)| format!("{sum}  {file}\n");
    let lines: String = headers.iter().map(line).collect();
    let own = text(&format!("{}\n{lines}", Checksum::default()))?;
    let mut json = format!("{{\"metadata\":{{\"{CHECKSUMS}\":{own},\"{TOTAL}\":{total}");
    for (key, value) in texts {
        json += &format!(",{}:{}", text(key)?, text(value)?);
    }
    let files = serde_json::to_string(files).map_err(|error| error.to_string())?;
    json += &format!("}},\"weight_map\":{files}}}\n");
    Ok(signed(json.into_bytes()))
}

/// The texts in `metadata`, and the file of each tensor.
type Read = (BTreeMap<String, String>, BTreeMap<String, String>);

/// Reads the texts in `metadata`, and the file of each tensor from `weight_map`, within the limits.
struct IndexSeed<'a>(&'a Limits);

impl<'de> DeserializeSeed<'de> for IndexSeed<'_> {
    type Value = Read;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for IndexSeed<'_> {
    type Value = Read;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("struct Index")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        const FILES: &str = "weight_map";
        const TEXTS: &str = "metadata";
        let (mut files, mut texts) = (None, None);
        while let Some(name) = map.next_key::<String>()? {
            let is_new = match name.as_str() {
                FILES => {
                    files.replace(map.next_value_seed(FilesSeed(self.0.max_tensors))?).is_none()
                }
                TEXTS => {
                    texts.replace(map.next_value_seed(MetadataSeed(self.0.max_records))?).is_none()
                }
                _ => {
                    let IgnoredAny = map.next_value()?;
                    true
                }
            };
            if !is_new {
                return Err(A::Error::custom(format!("duplicate field `{}`", shown(&name))));
            }
        }
        let files = files.ok_or_else(|| A::Error::missing_field(FILES))?;
        Ok((texts.unwrap_or_default(), files))
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

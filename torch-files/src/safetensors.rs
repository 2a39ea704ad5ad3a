//! Files of safetensors: the length of a header (8 bytes, little-endian), the header as JSON, and the bytes of the
//! tensors.
//!
//! A file may be hostile: the memory for its header is bounded while it is read. The safetensors crate can read headers
//! as well, but it takes about twenty times their size in memory, and of two tensors with the same name it takes the
//! last, where other readers take the first.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{
    Deserialize, DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess,
    Visitor,
};
use serde::ser::{Serialize, SerializeMap, Serializer};

use crate::dtype::Dtype;
use crate::error::Malformed;
use crate::limits::Limits;
use crate::source::{Checksum, Source};
use crate::text::shown;
use crate::value::MAX_DIMS;

/// The name in a header that is not that of a tensor.
pub(crate) const METADATA: &str = "__metadata__";

/// The entry of the metadata that has the checksums of the tensors in a shard that this crate has written, in the order
/// of the file; and that of an index, which has those of the headers of its files.
pub(crate) const CHECKSUMS: &str = "torch_files";

/// Returns checksums as the text of that entry of a shard.
pub(crate) fn checksums_as_text(sums: impl Iterator<Item = Checksum>) -> String {
    sums.map(|sum| sum.to_string()).collect::<Vec<_>>().join(" ")
}

/// Returns the checksums in the metadata of a shard that this crate has written; `None` for another file, which may
/// have something else by that name.
pub(crate) fn checksums_of(metadata: &BTreeMap<String, String>) -> Option<Vec<Checksum>> {
    metadata.get(CHECKSUMS)?.split(' ').map(Checksum::parse).collect()
}

/// The size in bytes of the length before the header.
pub(crate) const LENGTH: u64 = 8;

/// Returns whether a file that begins with these bytes can be a safetensors file: a length, followed by JSON.
pub(crate) fn is_safetensors(start: &[u8]) -> bool {
    start.get(8) == Some(&b'{')
}

/// The content of a header.
pub(crate) struct Header {
    pub(crate) metadata: BTreeMap<String, String>,
    /// In the order of the file.
    pub(crate) tensors: Vec<(String, Info)>,
    /// The position of the first tensor in the file.
    pub(crate) data: u64,
}

/// A tensor with a shape that libtorch supports.
pub(crate) struct Info {
    /// The name of the dtype, if it is unknown here.
    pub(crate) dtype: Result<Dtype, Box<str>>,
    pub(crate) shape: Vec<i64>,
    /// The position of its first byte, relative to the end of the header.
    pub(crate) start: u64,
}

/// Reads the bytes of the header.
pub(crate) fn read_header(source: &Source, limits: &Limits) -> Result<Vec<u8>, Malformed> {
    let mut len = [0; LENGTH as usize];
    source.read_at(0, &mut len).map_err(Malformed::Read)?;
    let len = u64::from_le_bytes(len);
    // Checked before the memory is allocated.
    if len > limits.max_header_bytes || len > source.len().saturating_sub(LENGTH) {
        let file = source.len();
        let problem = format!("its header would have {len} bytes, and the file has {file}");
        return Err(Malformed::Whole(problem));
    }
    let mut header = vec![0; usize::try_from(len).unwrap_or(0)];
    source.read_at(LENGTH, &mut header).map_err(Malformed::Read)?;
    Ok(header)
}

/// Reads the header, and checks it against the length of the file. The tensors are not read.
pub(crate) fn read(source: &Source, limits: &Limits) -> Result<Header, Malformed> {
    let json = read_header(source, limits)?;
    let (header, data_len) = parse(&json, limits)
        .map_err(|problem| Malformed::Whole(format!("its header: {problem}")))?;
    if header.data.checked_add(data_len) != Some(source.len()) {
        let (len, wanted) = (source.len(), header.data.saturating_add(data_len));
        return Err(Malformed::Whole(format!(
            "it has {len} bytes, but by its header it should have {wanted}"
        )));
    }
    Ok(header)
}

/// Parses a header, and checks that its tensors follow each other without gaps. Returns it and their size in bytes.
fn parse(json: &[u8], limits: &Limits) -> Result<(Header, u64), String> {
    let Entries { metadata, mut tensors } = parsed(json, limits)?;
    tensors.sort_by(|(one, _), (other, _)| one.cmp(other));
    // Readers differ in which of two tensors with the same name they take.
    if let Some(twice) = tensors.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(format!("`{}` occurs twice", shown(&twice[0].0)));
    }
    tensors.sort_by_key(|(_, entry)| entry.data_offsets);
    let mut data_len = 0;
    let mut infos = Vec::with_capacity(tensors.len());
    for (name, entry) in tensors {
        let (start, end) = entry.data_offsets;
        let Type(dtype) = entry.dtype;
        // Of an unknown dtype the size is unknown, and nothing is read.
        let bytes = match &dtype {
            Ok(dtype) => entry.shape.bytes(*dtype),
            Err(_) => end.checked_sub(start),
        };
        let Some(bytes) = bytes else {
            let name = shown(&name);
            return Err(format!("`{name}` has a shape that torch-files does not support"));
        };
        if start != data_len || start.checked_add(bytes) != Some(end) {
            return Err(format!(
                "the offsets of `{}` do not fit its shape and the other tensors",
                shown(&name)
            ));
        }
        data_len = end;
        infos.push((name, Info { dtype, shape: entry.shape.0, start }));
    }
    Ok((Header { metadata, tensors: infos, data: LENGTH + json.len() as u64 }, data_len))
}

/// The header as written in the file.
struct Entries {
    metadata: BTreeMap<String, String>,
    tensors: Vec<(String, Described)>,
}

fn parsed(json: &[u8], limits: &Limits) -> Result<Entries, String> {
    let mut json = serde_json::Deserializer::from_slice(json);
    let entries = EntriesSeed(limits).deserialize(&mut json);
    let entries = entries.and_then(|entries| json.end().map(|()| entries));
    entries.map_err(|error| error.to_string())
}

/// Reads the entries, up to the most that are allowed.
struct EntriesSeed<'a>(&'a Limits);

impl<'de> DeserializeSeed<'de> for EntriesSeed<'_> {
    type Value = Entries;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Entries, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for EntriesSeed<'_> {
    type Value = Entries;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
        let Self(limits) = self;
        let (mut metadata, mut tensors) = (None, Vec::new());
        while let Some(mut name) = map.next_key::<String>()? {
            if name == METADATA {
                let found = map.next_value_seed(MetadataSeed(limits.max_records))?;
                if metadata.replace(found).is_some() {
                    return Err(A::Error::custom("`__metadata__` occurs twice"));
                }
                continue;
            }
            if tensors.len() as u64 == limits.max_tensors {
                let most = limits.max_tensors;
                return Err(A::Error::custom(format!("more than {most} tensors")));
            }
            name.shrink_to_fit();
            tensors.push((name, map.next_value()?));
        }
        Ok(Entries { metadata: metadata.unwrap_or_default(), tensors })
    }
}

/// Reads the texts of the metadata, of which there may be so many. Anything else in it is ignored, and so is `null` in
/// its place.
pub(crate) struct MetadataSeed(pub(crate) usize);

impl<'de> DeserializeSeed<'de> for MetadataSeed {
    type Value = BTreeMap<String, String>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_option(self)
    }
}

impl<'de> Visitor<'de> for MetadataSeed {
    type Value = BTreeMap<String, String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of texts")
    }

    fn visit_none<E>(self) -> Result<Self::Value, E> {
        Ok(BTreeMap::new())
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut texts = BTreeMap::new();
        while let Some(name) = map.next_key::<String>()? {
            let OnlyText(Some(text)) = map.next_value()? else { continue };
            if texts.len() == self.0 {
                return Err(A::Error::custom(format!("more than {} entries of metadata", self.0)));
            }
            if texts.contains_key(&name) {
                return Err(A::Error::custom(format!("`{}` occurs twice", shown(&name))));
            }
            texts.insert(name, text);
        }
        Ok(texts)
    }
}

/// A text; `None` for any other JSON, for which no memory is taken.
struct OnlyText(Option<String>);

impl<'de> Deserialize<'de> for OnlyText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        macro_rules! ignored {
            ($($method:ident $type:ty),+) => {
                $(fn $method<E>(self, _: $type) -> Result<OnlyText, E> {
                    Ok(OnlyText(None))
                })+
            };
        }
        impl<'de> Visitor<'de> for Any {
            type Value = OnlyText;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("JSON")
            }
            ignored!(visit_bool bool, visit_i64 i64, visit_u64 u64, visit_f64 f64);
            fn visit_unit<E>(self) -> Result<OnlyText, E> {
                Ok(OnlyText(None))
            }
            fn visit_str<E>(self, text: &str) -> Result<OnlyText, E> {
                Ok(OnlyText(Some(text.to_owned())))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<OnlyText, A::Error> {
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(OnlyText(None))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<OnlyText, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(OnlyText(None))
            }
        }
        deserializer.deserialize_any(Any)
    }
}

#[derive(serde::Deserialize)]
struct Described {
    dtype: Type,
    shape: Shape,
    data_offsets: (u64, u64),
}

/// A dtype, or the name of an unknown one.
struct Type(Result<Dtype, Box<str>>);

impl<'de> Deserialize<'de> for Type {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        Ok(Self(Dtype::from_safetensors(&name).ok_or_else(|| shown(&name).into())))
    }
}

/// Sizes that are not negative, and not more of them than libtorch supports.
pub(crate) struct Shape(pub(crate) Vec<i64>);

impl Shape {
    /// Returns the size in bytes, if libtorch supports such a tensor. The product of the sizes must not overflow even
    /// if sizes of zero count as one.
    fn bytes(&self, dtype: Dtype) -> Option<u64> {
        let product = |least: i64| {
            let width = dtype.size() as i64;
            self.0.iter().try_fold(width, |bytes, &n| bytes.checked_mul(n.max(least)))
        };
        product(1)?;
        u64::try_from(product(0)?).ok()
    }
}

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Sizes;
        impl<'de> Visitor<'de> for Sizes {
            type Value = Shape;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a shape")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Shape, A::Error> {
                let mut sizes = Vec::new();
                while let Some(size) = seq.next_element::<u64>()? {
                    if sizes.len() == MAX_DIMS {
                        return Err(A::Error::custom(format!("more than {MAX_DIMS} dimensions")));
                    }
                    sizes.push(i64::try_from(size).map_err(A::Error::custom)?);
                }
                sizes.shrink_to_fit();
                Ok(Shape(sizes))
            }
        }
        deserializer.deserialize_seq(Sizes)
    }
}

/// A tensor in a header that is written.
#[derive(Debug, serde::Serialize)]
pub(crate) struct Written {
    pub(crate) dtype: &'static str,
    pub(crate) shape: Vec<i64>,
    pub(crate) data_offsets: (u64, u64),
}

/// Returns the header of these tensors as JSON, with its length before it.
pub(crate) fn header<'a>(
    metadata: &BTreeMap<String, String>,
    tensors: impl Iterator<Item = (&'a str, &'a Written)> + Clone,
) -> serde_json::Result<Vec<u8>> {
    let mut header = serde_json::to_vec(&Fields { metadata, tensors })?;
    // Padding with spaces aligns the tensors.
    header.resize(header.len().next_multiple_of(8), b' ');
    Ok([&(header.len() as u64).to_le_bytes(), &header[..]].concat())
}

struct Fields<'a, T> {
    metadata: &'a BTreeMap<String, String>,
    tensors: T,
}

impl<'a, T: Iterator<Item = (&'a str, &'a Written)> + Clone> Serialize for Fields<'_, T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        if !self.metadata.is_empty() {
            map.serialize_entry(METADATA, self.metadata)?;
        }
        self.tensors.clone().try_for_each(|(name, tensor)| map.serialize_entry(name, tensor))?;
        map.end()
    }
}

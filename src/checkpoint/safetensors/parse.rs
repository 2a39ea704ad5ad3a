//! Reading the header of a safetensors file, which may be hostile: its memory is bounded while it is read.
//!
//! The safetensors crate can read headers as well, but it takes about twenty times their size in memory, and of two
//! tensors with the same name it takes the last, where other readers take the first.

use std::fmt;

use safetensors::Dtype;
use serde::Deserialize;
use serde::de::value::StrDeserializer;
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use tch::Kind;

use crate::checkpoint::limits::MAX_TENSORS;
use crate::checkpoint::safetensors::header::KEY;
use crate::checkpoint::safetensors::kind;
use crate::checkpoint::value::MAX_DIMS;
use crate::error::shown;

/// The content of a header.
pub(super) struct Header {
    /// The manifest, if this crate has written the file.
    pub(super) manifest: Option<String>,
    /// In the order of the file.
    pub(super) tensors: Vec<(String, Info)>,
    /// The size of all tensors in bytes.
    pub(super) data_len: u64,
}

/// A tensor with a shape that tch supports.
pub(super) struct Info {
    /// The name of the dtype, if tch does not have it.
    pub(super) kind: Result<Kind, Box<str>>,
    pub(super) size: Vec<i64>,
    /// The position of its first byte, relative to the end of the header.
    pub(super) start: u64,
}

/// Reads a header, and checks that its tensors follow each other without gaps.
pub(super) fn header(json: &[u8]) -> Result<Header, String> {
    let Entries { manifest, mut tensors } =
        serde_json::from_slice(json).map_err(|error| error.to_string())?;
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
        let kind = entry.dtype.0;
        // Of a dtype that tch does not have, the size is unknown and nothing is read.
        let bytes = match &kind {
            Ok(kind) => entry.shape.bytes(*kind),
            Err(_) => end.checked_sub(start),
        };
        let Some(bytes) = bytes else {
            let name = shown(&name);
            return Err(format!("`{name}` has a shape that tch does not support"));
        };
        if start != data_len || start.checked_add(bytes) != Some(end) {
            return Err(format!(
                "the offsets of `{}` do not fit its shape and the other tensors",
                shown(&name)
            ));
        }
        data_len = end;
        infos.push((name, Info { kind, size: entry.shape.0, start }));
    }
    Ok(Header { manifest, tensors: infos, data_len })
}

/// The header as written in the file.
struct Entries {
    manifest: Option<String>,
    tensors: Vec<(String, Entry)>,
}

#[derive(Deserialize)]
struct Entry {
    dtype: Type,
    shape: Shape,
    data_offsets: (u64, u64),
}

/// A dtype, or the name of one that tch does not have.
struct Type(Result<Kind, Box<str>>);

impl<'de> Deserialize<'de> for Type {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        let known = Dtype::deserialize(StrDeserializer::<D::Error>::new(&name)).ok();
        Ok(Self(known.and_then(kind).ok_or_else(|| shown(&name).into())))
    }
}

impl Shape {
    /// Returns the size in bytes, if libtorch supports such a tensor. The product of the sizes must not overflow even
    /// if sizes of zero count as one.
    fn bytes(&self, kind: Kind) -> Option<u64> {
        let product = |least: i64| {
            let width = kind.elt_size_in_bytes() as i64;
            self.0.iter().try_fold(width, |bytes, &n| bytes.checked_mul(n.max(least)))
        };
        product(1)?;
        u64::try_from(product(0)?).ok()
    }
}

/// Sizes that are not negative, and not more of them than libtorch supports.
struct Shape(Vec<i64>);

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

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Names;
        impl<'de> Visitor<'de> for Names {
            type Value = Entries;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let (mut metadata, mut tensors) = (None, Vec::new());
                while let Some(mut name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        let found = map.next_value::<Option<Metadata>>()?;
                        if metadata.replace(found).is_some() {
                            return Err(A::Error::custom("`__metadata__` occurs twice"));
                        }
                        continue;
                    }
                    if tensors.len() == MAX_TENSORS {
                        return Err(A::Error::custom(format!("more than {MAX_TENSORS} tensors")));
                    }
                    name.shrink_to_fit();
                    tensors.push((name, map.next_value()?));
                }
                let manifest = metadata.flatten().and_then(|Metadata(manifest)| manifest);
                Ok(Entries { manifest, tensors })
            }
        }
        deserializer.deserialize_map(Names)
    }
}

/// The metadata, of which only the entry of this crate is kept.
struct Metadata(Option<String>);

impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Texts;
        impl<'de> Visitor<'de> for Texts {
            type Value = Metadata;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of texts")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Metadata, A::Error> {
                let mut ours = None;
                while let Some(name) = map.next_key::<String>()? {
                    if name != KEY {
                        let IgnoredAny = map.next_value()?;
                    } else if ours.replace(map.next_value()?).is_some() {
                        return Err(A::Error::custom(format!("`{KEY}` occurs twice")));
                    }
                }
                Ok(Metadata(ours))
            }
        }
        deserializer.deserialize_map(Texts)
    }
}

//! Reading the header of a safetensors file, which may be hostile: what it takes is bounded while it is read.
//!
//! The safetensors crate reads headers, too, but takes some twenty times their memory, and takes the last of two
//! tensors of one name, where other readers take the first.

use std::fmt;

use safetensors::Dtype;
use serde::Deserialize;
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use tch::Kind;

use crate::checkpoint::pickle::MAX_DIMS;
use crate::checkpoint::safetensors::header::KEY;
use crate::checkpoint::safetensors::{MAX_TENSORS, kind};

/// What a header says.
pub(super) struct Header {
    /// What this crate has written.
    pub(super) manifest: Option<String>,
    /// In the order of the file.
    pub(super) tensors: Vec<(String, Info)>,
    /// The bytes of all tensors.
    pub(super) data_len: u64,
}

/// A tensor that tch can have.
pub(super) struct Info {
    pub(super) kind: Kind,
    pub(super) size: Vec<i64>,
    /// Its first byte behind the header.
    pub(super) start: u64,
}

/// Reads a header, and checks that its tensors fill the file without gaps.
pub(super) fn header(json: &[u8]) -> Result<Header, String> {
    let Entries { manifest, mut tensors } =
        serde_json::from_slice(json).map_err(|error| error.to_string())?;
    tensors.sort_by(|(one, _), (other, _)| one.cmp(other));
    // Readers differ in which of the two they take.
    if let Some(twice) = tensors.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(format!("`{}` stands there twice", twice[0].0));
    }
    tensors.sort_by_key(|(_, entry)| entry.data_offsets);
    let mut data_len = 0;
    let mut infos = Vec::with_capacity(tensors.len());
    for (name, entry) in tensors {
        let (start, end) = entry.data_offsets;
        let Some((kind, bytes)) = entry.layout() else {
            return Err(format!("`{name}` has a dtype or shape that tch does not"));
        };
        if start != data_len || start.checked_add(bytes) != Some(end) {
            return Err(format!("`{name}` does not lie where its shape and the others leave it"));
        }
        data_len = end;
        infos.push((name, Info { kind, size: entry.shape.0, start }));
    }
    Ok(Header { manifest, tensors: infos, data_len })
}

/// The header as it stands there.
struct Entries {
    manifest: Option<String>,
    tensors: Vec<(String, Entry)>,
}

#[derive(Deserialize)]
struct Entry {
    dtype: Dtype,
    shape: Shape,
    data_offsets: (u64, u64),
}

impl Entry {
    /// The dtype and the bytes, if libtorch can have such a tensor: without the zeros, too, no product may overflow.
    fn layout(&self) -> Option<(Kind, u64)> {
        let kind = kind(self.dtype)?;
        let product = |least: i64| {
            let width = kind.elt_size_in_bytes() as i64;
            self.shape.0.iter().try_fold(width, |bytes, &n| bytes.checked_mul(n.max(least)))
        };
        product(1)?;
        u64::try_from(product(0)?).ok().map(|bytes| (kind, bytes))
    }
}

/// Sizes, none of them negative and not more than libtorch can have.
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
                            return Err(A::Error::custom("`__metadata__` stands there twice"));
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

/// Texts by their names, of which only ours is kept.
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
                        return Err(A::Error::custom(format!("`{KEY}` stands there twice")));
                    }
                }
                Ok(Metadata(ours))
            }
        }
        deserializer.deserialize_map(Texts)
    }
}

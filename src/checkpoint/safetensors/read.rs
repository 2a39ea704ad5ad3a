//! Reading a safetensors file, which may be hostile: the memory for its header is bounded while it is read.
//!
//! The safetensors crate can read headers as well, but it takes about twenty times their size in memory, and of two
//! tensors with the same name it takes the last, where other readers take the first.

use std::collections::BTreeMap;
use std::fmt;
use std::io::SeekFrom;
use std::sync::Arc;

use safetensors::Dtype;
use safetensors::tensor::{Metadata as TensorMetadata, TensorInfo};
use serde::Deserialize;
use serde::de::value::StrDeserializer;
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use tch::Kind;
use xxhash_rust::xxh3::Xxh3Default;

use super::manifest::{KEY, Manifest, PartManifest, VERSION, Version, of_header};
use crate::atomic::Target;
use crate::checkpoint::CheckpointError;
use crate::checkpoint::archive::{Archive, Check, Checksum, Region};
use crate::checkpoint::entry::{Failure, Location, TensorEntry};
use crate::checkpoint::limits::{MAX_HEADER_BYTES, MAX_PARTS, MAX_TENSORS};
use crate::checkpoint::part::{Part, StatePart, WRITER, problem_of_name};
use crate::checkpoint::safetensors::{dtype, kind, too_much};
use crate::checkpoint::source::Source;
use crate::checkpoint::value::MAX_DIMS;
use crate::error::{Result, shown, unsaveable};

/// Returns whether a file that begins with these bytes can be a safetensors file: a length, followed by JSON.
pub(crate) fn is_safetensors(start: &[u8]) -> bool {
    start.get(8) == Some(&b'{')
}

/// Reads the header, and checks it against the length of the file. The tensors are not read.
pub(crate) fn read(source: Arc<Source>) -> Result<Archive> {
    let header = read_header(&source)?;
    let Header { manifest, tensors, data_len } =
        parse(&header).map_err(|problem| source.damaged(format!("its header: {problem}")))?;
    let start = 8 + header.len() as u64;
    if start.checked_add(data_len) != Some(source.len()) {
        let (len, wanted) = (source.len(), start.saturating_add(data_len));
        return Err(source
            .damaged(format!("it has {len} bytes, but by its header it should have {wanted}"))
            .into());
    }
    // The damage may be in the key of the manifest itself.
    if manifest.is_none() && is_ours(&header) {
        return Err(source.damaged("the key of its metadata is damaged").into());
    }
    let manifest = manifest.map(|text| manifest_of(&source, &header, &text)).transpose()?;
    drop(header);
    let mut entries = Vec::with_capacity(tensors.len());
    let mut others = BTreeMap::new();
    for (name, Info { kind, size, start: place }) in tensors {
        let offset = start + place;
        let location = Location { source: Arc::clone(&source), offset, stride: None };
        match kind {
            Ok(kind) => entries.push((name, offset, TensorEntry::in_file(kind, size, location))),
            Err(dtype) => drop(others.insert(name, unsupported(&dtype))),
        }
    }
    match manifest {
        Some(manifest) => with_manifest(&source, manifest, entries),
        // A file from another program is a model without checksums.
        None => {
            let tensors = entries.into_iter().map(|(name, _, entry)| (name, entry)).collect();
            let model = Part::model(tensors, others);
            Ok(Archive {
                source,
                parts: BTreeMap::from([("model".to_owned(), model)]),
                regions: Vec::new(),
            })
        }
    }
}

fn unsupported(dtype: &str) -> Part {
    Part::Unknown(format!("tch has no dtype {}", shown(dtype)))
}

fn read_header(source: &Source) -> Result<Vec<u8>> {
    let mut len = [0; 8];
    source.read_at(0, &mut len)?;
    let len = u64::from_le_bytes(len);
    // Checked before the memory is allocated.
    if len > MAX_HEADER_BYTES || len > source.len().saturating_sub(8) {
        return Err(source
            .damaged(format!(
                "its header would have {len} bytes, and the file has {}",
                source.len()
            ))
            .into());
    }
    let mut header = vec![0; usize::try_from(len).unwrap_or(0)];
    source.read_at(8, &mut header)?;
    Ok(header)
}

/// Returns whether a header contains a manifest, under any name.
fn is_ours(header: &[u8]) -> bool {
    let marks: [&[u8]; 2] = [br#"{\"format\":"#, br#"\"writer\":\"tch-amp "#];
    marks.iter().any(|mark| header.windows(mark.len()).any(|window| window == *mark))
}

/// Reads the manifest, and verifies the checksum of the header with it.
fn manifest_of(source: &Source, header: &[u8], text: &str) -> Result<Manifest> {
    if let Some(problem) = too_much(text) {
        return Err(source.damaged(format!("its metadata {problem}")).into());
    }
    let damaged = |error: serde_json::Error| source.damaged(format!("its metadata: {error}"));
    let Version { format, checksum } = serde_json::from_str(text).map_err(damaged)?;
    // Before anything else is believed: a damaged bit must not make a later version of this one.
    let is_intact = |checksum| of_header(header, checksum) == Some(checksum);
    if !checksum.is_none_or(is_intact) && !cfg!(fuzzing) {
        return Err(source.damaged("the checksum of its header does not match").into());
    }
    if format > VERSION {
        let (path, found, supported) = (source.path().to_owned(), format, VERSION);
        return Err(CheckpointError::Newer { path, found, supported }.into());
    }
    Ok(serde_json::from_str(text).map_err(damaged)?)
}

/// Assigns every tensor to its part.
fn with_manifest(
    source: &Arc<Source>,
    manifest: Manifest,
    entries: Vec<(String, u64, TensorEntry)>,
) -> Result<Archive> {
    let Manifest { checksums, parts, .. } = manifest;
    if parts.len() > MAX_PARTS {
        return Err(source.damaged(format!("it has more than {MAX_PARTS} parts")).into());
    }
    if checksums.len() != entries.len() {
        return Err(source.damaged("it does not have one checksum for each tensor").into());
    }
    let mut built: BTreeMap<String, Part> =
        parts.into_iter().filter_map(|(name, part)| Some((name, part.into_part()?))).collect();
    let mut regions = Vec::with_capacity(entries.len());
    for ((name, offset, entry), checksum) in entries.into_iter().zip(checksums) {
        let check = Check::Xxh3(checksum);
        regions.push(Region { name: name.clone(), offset, len: entry.len() as u64, check });
        if !give(&mut built, &name, entry) {
            return Err(source.damaged(format!("`{}` belongs to no part", shown(&name))).into());
        }
    }
    Ok(Archive { source: Arc::clone(source), parts: built, regions })
}

/// Adds a tensor to its part. Returns `false` if no part can take it.
fn give(parts: &mut BTreeMap<String, Part>, name: &str, entry: TensorEntry) -> bool {
    let Some((part, rest)) = name.split_once('/') else {
        return parts.insert(name.to_owned(), Part::Tensor(entry)).is_none();
    };
    match parts.get_mut(part) {
        Some(Part::Model(tensors) | Part::State(StatePart { tensors, .. })) => {
            tensors.insert(rest.to_owned(), entry).is_none()
        }
        Some(Part::Optimizer(optimizer)) => match rest.rsplit_once('/') {
            Some((parameter, key)) => {
                let entries = optimizer.state.entry(parameter.to_owned()).or_default();
                entries.insert(key.to_owned(), Box::new(entry)).is_none()
            }
            None => false,
        },
        _ => false,
    }
}

/// The content of a header.
struct Header {
    /// The manifest, if this crate has written the file.
    manifest: Option<String>,
    /// In the order of the file.
    tensors: Vec<(String, Info)>,
    /// The size of all tensors in bytes.
    data_len: u64,
}

/// A tensor with a shape that tch supports.
struct Info {
    /// The name of the dtype, if tch does not have it.
    kind: std::result::Result<Kind, Box<str>>,
    size: Vec<i64>,
    /// The position of its first byte, relative to the end of the header.
    start: u64,
}

/// Reads a header, and checks that its tensors follow each other without gaps.
fn parse(json: &[u8]) -> std::result::Result<Header, String> {
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
    tensors: Vec<(String, Described)>,
}

#[derive(Deserialize)]
struct Described {
    dtype: Type,
    shape: Shape,
    data_offsets: (u64, u64),
}

/// A dtype, or the name of one that tch does not have.
struct Type(std::result::Result<Kind, Box<str>>);

impl<'de> Deserialize<'de> for Type {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
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
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Sizes;
        impl<'de> Visitor<'de> for Sizes {
            type Value = Shape;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a shape")
            }
            fn visit_seq<A: SeqAccess<'de>>(
                self,
                mut seq: A,
            ) -> std::result::Result<Shape, A::Error> {
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
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct EntriesVisitor;
        impl<'de> Visitor<'de> for EntriesVisitor {
            type Value = Entries;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(
                self,
                mut map: A,
            ) -> std::result::Result<Entries, A::Error> {
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
        deserializer.deserialize_map(EntriesVisitor)
    }
}

/// The metadata, of which only the entry of this crate is kept.
struct Metadata(Option<String>);

impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Texts;
        impl<'de> Visitor<'de> for Texts {
            type Value = Metadata;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of texts")
            }
            fn visit_map<A: MapAccess<'de>>(
                self,
                mut map: A,
            ) -> std::result::Result<Metadata, A::Error> {
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

type Parts = BTreeMap<String, Part>;

/// A tensor with its name and its place in the file.
type Placed<'a> = (TensorInfo, String, &'a TensorEntry);

/// The name in a header that is not that of a tensor.
const METADATA: &str = "__metadata__";

/// The name in errors that concern no single part.
const WHOLE: &str = "the checkpoint";

/// The layout of a file: the tensors in the order of the file, and the header except for the checksums.
#[derive(Debug)]
pub(crate) struct Layout<'a> {
    tensors: Vec<Placed<'a>>,
    manifest: Manifest,
    header_len: usize,
}

impl<'a> Layout<'a> {
    /// Lays out the parts. Returns an error for anything that the format cannot hold.
    pub(crate) fn new(parts: &'a Parts) -> Result<Self> {
        let tensors = place(named(parts))?;
        let checksums = vec![Checksum::default(); tensors.len()];
        let manifest = Manifest {
            format: VERSION,
            writer: WRITER.to_owned(),
            checksum: Checksum::default(),
            checksums,
            parts: parts
                .iter()
                .map(|(name, part)| (name.clone(), PartManifest::of(part)))
                .collect(),
        };
        for (name, part) in &manifest.parts {
            read_again(name, part)?;
        }
        let mut layout = Self { tensors, manifest, header_len: 0 };
        layout.header_len = layout.header()?.len();
        check_size(layout.tensors.len(), layout.header_len)?;
        Ok(layout)
    }

    /// Computes the checksum of the header, once those of the tensors are known.
    fn sign(&mut self) -> Result<()> {
        let own = of_header(&self.header()?, self.manifest.checksum);
        let none = || unsaveable(WHOLE, "its header has no checksum");
        self.manifest.checksum = own.ok_or_else(none)?;
        Ok(())
    }

    /// Returns the header with the current checksums. Its length does not depend on them.
    fn header(&self) -> Result<Vec<u8>> {
        let refuse = |error: serde_json::Error| unsaveable(WHOLE, error.to_string());
        let manifest = serde_json::to_string(&self.manifest).map_err(refuse)?;
        if let Some(problem) = too_much(&manifest) {
            let problem = format!("its metadata {problem}; save long values as tensors");
            return Err(unsaveable(WHOLE, problem).into());
        }
        header(KEY, manifest, &self.tensors)
    }
}

/// The layout of a file that has tensors and nothing else of this crate.
#[derive(Debug)]
pub(crate) struct Weights<'a> {
    tensors: Vec<Placed<'a>>,
    header: Vec<u8>,
}

impl<'a> Weights<'a> {
    /// Lays out the tensors. Returns an error for anything that the format cannot hold.
    pub(crate) fn new(entries: &'a BTreeMap<String, TensorEntry>) -> Result<Self> {
        if entries.contains_key(METADATA) {
            return Err(unsaveable(METADATA, "the format has that name for something else").into());
        }
        let named = entries.iter().map(|(name, entry)| (name.clone(), entry));
        let tensors = place(named)?;
        // Other programs write this, and transformers requires it.
        let header = header("format", "pt".to_owned(), &tensors)?;
        check_size(tensors.len(), header.len())?;
        Ok(Self { tensors, header })
    }

    pub(crate) fn write(&self, out: &mut dyn Target) -> std::result::Result<(), Failure> {
        out.write_all(&(self.header.len() as u64).to_le_bytes())?;
        out.write_all(&self.header)?;
        self.tensors.iter().try_for_each(|(_, _, entry)| {
            entry.read(&mut |bytes| Ok::<_, Failure>(out.write_all(bytes)?))
        })
    }
}

/// Returns a header with one entry of metadata.
fn header(key: &str, value: String, tensors: &[Placed<'_>]) -> Result<Vec<u8>> {
    // The type of this hash map depends on the features that other crates enable.
    let metadata = [(key.to_owned(), value)].into_iter().collect();
    let infos = tensors.iter().map(|(info, name, _)| (name.clone(), info.clone()));
    let metadata = TensorMetadata::new(Some(metadata), infos.collect())
        .map_err(|error| unsaveable(WHOLE, error.to_string()))?;
    let header = serde_json::to_vec(&metadata);
    let mut header = header.map_err(|error| unsaveable(WHOLE, error.to_string()))?;
    // Padding with spaces aligns the tensors.
    header.resize(header.len().next_multiple_of(8), b' ');
    Ok(header)
}

/// Returns an error for more tensors, or a longer header, than readers accept.
fn check_size(tensors: usize, header_len: usize) -> Result<()> {
    let problem = if tensors > MAX_TENSORS {
        format!("it has {tensors} tensors, more than {MAX_TENSORS}")
    } else if header_len as u64 > MAX_HEADER_BYTES {
        format!("its header would have {header_len} bytes")
    } else {
        return Ok(());
    };
    Err(unsaveable(WHOLE, problem).into())
}

/// Returns an error for a part that could not be loaded again: one with a name from a Python program that is not
/// allowed, or with values that are nested too deep.
fn read_again(name: &str, part: &PartManifest) -> Result<()> {
    if let Some(problem) = problem_of_name(name) {
        return Err(unsaveable(name, problem).into());
    }
    // Wrapped in two more levels, because those around it in the file count as well.
    let text = serde_json::to_string(&[[part]]);
    let read = text.and_then(|text| serde_json::from_str::<[[PartManifest; 1]; 1]>(&text));
    read.map_err(|error| unsaveable(name, error.to_string()))?;
    Ok(())
}

/// Writes the tensors and then the header, with the checksums computed on the way.
pub(crate) fn write(
    layout: &mut Layout<'_>,
    out: &mut dyn Target,
) -> std::result::Result<(), Failure> {
    let blank = vec![b' '; 8 + layout.header_len];
    out.write_all(&blank)?;
    for (index, (_, _, entry)) in layout.tensors.iter().enumerate() {
        let mut hash = Xxh3Default::new();
        entry.read(&mut |bytes| {
            hash.update(bytes);
            Ok::<_, Failure>(out.write_all(bytes)?)
        })?;
        layout.manifest.checksums[index] = Checksum(hash.digest());
    }
    layout.sign()?;
    let header = layout.header()?;
    out.seek(SeekFrom::Start(0))?;
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    Ok(out.write_all(&header)?)
}

/// Assigns every tensor its place in the file. Tensors with the widest elements come first, so that all are aligned;
/// otherwise they are sorted by name.
fn place<'a>(tensors: impl Iterator<Item = (String, &'a TensorEntry)>) -> Result<Vec<Placed<'a>>> {
    let with_dtype = |(name, entry): (String, &'a TensorEntry)| match dtype(entry.kind) {
        Some(dtype) => Ok((dtype, name, entry)),
        None => {
            let problem = format!("safetensors has no {:?}; save it as `.pt`", entry.kind);
            Err(unsaveable(&name, problem))
        }
    };
    let mut named = tensors.map(with_dtype).collect::<std::result::Result<Vec<_>, _>>()?;
    let width = |entry: &TensorEntry| entry.kind.elt_size_in_bytes();
    named.sort_by(|(_, a, one), (_, b, other)| width(other).cmp(&width(one)).then(a.cmp(b)));
    let mut start = 0;
    let placed = named.into_iter().map(|(dtype, name, entry)| {
        let shape = entry.size.iter().map(|&n| n.unsigned_abs() as usize).collect();
        let data_offsets = (start, start + entry.len());
        start = data_offsets.1;
        (TensorInfo { dtype, shape, data_offsets }, name, entry)
    });
    Ok(placed.collect())
}

/// Returns all tensors by their names in the file.
fn named(parts: &Parts) -> impl Iterator<Item = (String, &TensorEntry)> {
    parts.iter().flat_map(|(part_name, part)| {
        part.tensors().map(move |(name, entry)| (full_name(part_name, part, &name), entry))
    })
}

/// Returns the name of a tensor in the file. The slash distinguishes a tensor within a part from a part that is a
/// tensor.
fn full_name(name: &str, part: &Part, tensor: &str) -> String {
    match part {
        Part::Tensor(_) => name.to_owned(),
        _ => format!("{name}/{tensor}"),
    }
}

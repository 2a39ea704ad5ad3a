//! Writing a safetensors file.

use std::collections::BTreeMap;
use std::io::SeekFrom;

use safetensors::tensor::{Metadata, TensorInfo};
use xxhash_rust::xxh3::Xxh3Default;

use crate::atomic::Target;
use crate::checkpoint::archive::Checksum;
use crate::checkpoint::entry::{Entry, Failure};
use crate::checkpoint::limits::{MAX_HEADER_BYTES, MAX_TENSORS};
use crate::checkpoint::part::{Part, WRITER, problem_of_name};
use crate::checkpoint::safetensors::manifest::{KEY, Manifest, PartManifest, VERSION, of_header};
use crate::checkpoint::safetensors::{dtype, too_much};
use crate::error::{Result, unsaveable};

type Parts = BTreeMap<String, Part>;

/// A tensor with its name and its place in the file.
type Placed<'a> = (TensorInfo, String, &'a Entry);

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
    pub(crate) fn new(entries: &'a BTreeMap<String, Entry>) -> Result<Self> {
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
    let metadata = Metadata::new(Some(metadata), infos.collect())
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
fn place<'a>(tensors: impl Iterator<Item = (String, &'a Entry)>) -> Result<Vec<Placed<'a>>> {
    let with_dtype = |(name, entry): (String, &'a Entry)| match dtype(entry.kind) {
        Some(dtype) => Ok((dtype, name, entry)),
        None => {
            let problem = format!("safetensors has no {:?}; save it as `.pt`", entry.kind);
            Err(unsaveable(&name, problem))
        }
    };
    let mut named = tensors.map(with_dtype).collect::<std::result::Result<Vec<_>, _>>()?;
    let width = |entry: &Entry| entry.kind.elt_size_in_bytes();
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
fn named(parts: &Parts) -> impl Iterator<Item = (String, &Entry)> {
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

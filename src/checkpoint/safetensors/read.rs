//! Reading a safetensors file.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::checkpoint::CheckpointError;
use crate::checkpoint::archive::{Archive, Check, Region};
use crate::checkpoint::entry::{Entry, Location};
use crate::checkpoint::limits::{MAX_HEADER_BYTES, MAX_PARTS};
use crate::checkpoint::part::{OptimizerPart, Part, StatePart};
use crate::checkpoint::safetensors::header::{Manifest, PartManifest, VERSION, Version, of_header};
use crate::checkpoint::safetensors::parse::{self, Header, Info};
use crate::checkpoint::safetensors::too_much;
use crate::checkpoint::source::Source;
use crate::error::{Result, shown};

/// Whether a file that begins with these bytes can be a safetensors file: a length, followed by JSON.
pub(crate) fn is_safetensors(start: &[u8]) -> bool {
    start.get(8) == Some(&b'{')
}

/// Reads the header, and checks it against the length of the file. The tensors are not read.
pub(crate) fn read(source: Arc<Source>) -> Result<Archive> {
    let header = read_header(&source)?;
    let Header { manifest, tensors, data_len } = parse::header(&header)
        .map_err(|problem| source.damaged(format!("its header: {problem}")))?;
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
            Ok(kind) => entries.push((name, offset, Entry::in_file(kind, size, location))),
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

/// Whether a header contains a manifest, under any name.
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
    entries: Vec<(String, u64, Entry)>,
) -> Result<Archive> {
    let Manifest { checksums, parts, .. } = manifest;
    if parts.len() > MAX_PARTS {
        return Err(source.damaged(format!("it has more than {MAX_PARTS} parts")).into());
    }
    if checksums.len() != entries.len() {
        return Err(source.damaged("it does not have one checksum for each tensor").into());
    }
    let mut built: BTreeMap<String, Part> =
        parts.into_iter().filter_map(|(name, part)| Some((name, empty(part)?))).collect();
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

/// Makes a part without its tensors; `None` for a part that is a single tensor.
fn empty(part: PartManifest) -> Option<Part> {
    Some(match part {
        PartManifest::Model => Part::Model(BTreeMap::new()),
        PartManifest::Optimizer { param_groups, params_are_numbers, adam_or_adamw, by_muon } => {
            let state = BTreeMap::new();
            Part::Optimizer(OptimizerPart {
                state,
                param_groups,
                params_are_numbers,
                adam_or_adamw,
                by_muon,
            })
        }
        PartManifest::Scaler { state } => Part::Scaler(state),
        PartManifest::Value { value, .. } => Part::Value(value),
        PartManifest::Empty => Part::Empty,
        PartManifest::State { value: values, .. } => {
            Part::State(StatePart::new(BTreeMap::new(), values))
        }
        PartManifest::Tensor => return None,
    })
}

/// Adds a tensor to its part. Returns `false` if no part can take it.
fn give(parts: &mut BTreeMap<String, Part>, name: &str, entry: Entry) -> bool {
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

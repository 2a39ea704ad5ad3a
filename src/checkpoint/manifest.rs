//! Checkpoints as safetensors files.
//!
//! The metadata of a file has one entry, the manifest: the parts, and an XXH3 checksum for each tensor and for the
//! header itself. These are computed while the tensors are written, and the header with them is written last.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use torch_files::atomic::Target;
use torch_files::distributed::ShardWriter;
use torch_files::{Checksum, Dtype, FileKind, Hashed, Limits, TorchFile, Value, Writer};

use crate::checkpoint::CheckpointError;
use crate::checkpoint::entry::TensorEntry;
use crate::checkpoint::part::{
    Archive, MAX_PARTS, OptimizerPart, Part, StatePart, WRITER, problem_of_name,
};
use crate::checkpoint::torch_layout::Reader;
use crate::dtype::dtype_of;
use crate::error::{Result, shown, unsaveable};
use crate::optim::ParamGroupState;
use crate::scale::GradScalerState;

/// The only entry of `__metadata__`, so that the bytes of a file do not depend on the order of a hash map.
const KEY: &str = "tch_amp";

/// The version of the format that is written. Later versions are refused, and all earlier ones are read.
const VERSION: u32 = 1;

/// The largest size of the manifest in bytes.
pub(crate) const MAX_MANIFEST_BYTES: usize = 32 << 20;

/// The description that this crate writes in addition to the tensors.
#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    format: u32,
    /// The version of this crate, for information only.
    writer: String,
    /// The checksum of the header, with zeros in place of the checksum itself.
    checksum: Checksum,
    /// The checksum of each tensor's bytes, in the order of the file.
    checksums: Vec<Checksum>,
    parts: BTreeMap<String, PartManifest>,
}

/// A part without its tensors, which are named `part/…`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", try_from = "Fields")]
pub(crate) enum PartManifest {
    Model,
    Optimizer {
        param_groups: Vec<ParamGroupState>,
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        params_are_numbers: bool,
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        adam_or_adamw: bool,
        #[serde(skip_serializing_if = "BTreeSet::is_empty")]
        by_muon: BTreeSet<String>,
    },
    Scaler {
        state: GradScalerState,
    },
    State {
        value: Value,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        non_finite: Vec<String>,
    },
    Tensor,
    Value {
        value: Value,
        /// JSON pointers to the texts in the value that stand for non-finite floats.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        non_finite: Vec<String>,
    },
    Empty,
}

/// The fields of all kinds. serde's derived code for a tagged enum buffers the content, and cannot read numbers back
/// from the buffer if serde_json's `arbitrary_precision` is enabled; see `optim/state_dict/fields.rs`.
#[derive(Deserialize)]
struct Fields {
    kind: String,
    param_groups: Option<Vec<ParamGroupState>>,
    #[serde(default)]
    params_are_numbers: bool,
    #[serde(default)]
    adam_or_adamw: bool,
    #[serde(default)]
    by_muon: BTreeSet<String>,
    state: Option<GradScalerState>,
    #[serde(default)]
    value: Value,
    #[serde(default)]
    non_finite: Vec<String>,
}

impl TryFrom<Fields> for PartManifest {
    type Error = String;

    fn try_from(fields: Fields) -> std::result::Result<Self, String> {
        let Fields {
            kind,
            param_groups,
            params_are_numbers,
            adam_or_adamw,
            by_muon,
            state,
            value,
            non_finite,
        } = fields;
        let missing = |name: &str| format!("a part of the kind {} has no {name}", shown(&kind));
        Ok(match kind.as_str() {
            "model" => Self::Model,
            "optimizer" => {
                let param_groups = param_groups.ok_or_else(|| missing("param_groups"))?;
                Self::Optimizer { param_groups, params_are_numbers, adam_or_adamw, by_muon }
            }
            "scaler" => Self::Scaler { state: state.ok_or_else(|| missing("state"))? },
            "tensor" => Self::Tensor,
            "value" | "state" => {
                let value = value.with_non_finite(&non_finite);
                let value =
                    value.ok_or("a value has no non-finite float where `non_finite` says so")?;
                match (kind.as_str(), &value) {
                    ("value", _) => Self::Value { value, non_finite },
                    (_, Value::Map(_)) => Self::State { value, non_finite },
                    _ => return Err("a state is not a map of values".to_owned()),
                }
            }
            "empty" => Self::Empty,
            _ => return Err(format!("a part has the unknown kind {}", shown(&kind))),
        })
    }
}

impl PartManifest {
    /// Returns what the file says of a part besides its tensors.
    pub(crate) fn of(part: &Part) -> Self {
        match part {
            Part::Model(_) => Self::Model,
            Part::State(StatePart { maybe, .. }) if !maybe.is_empty() => Self::Model,
            Part::Optimizer(OptimizerPart {
                state: _,
                param_groups,
                params_are_numbers,
                adam_or_adamw,
                by_muon,
                // A part with any is not saved.
                others: _,
            }) => {
                let param_groups = param_groups.clone();
                Self::Optimizer {
                    param_groups,
                    params_are_numbers: *params_are_numbers,
                    adam_or_adamw: *adam_or_adamw,
                    by_muon: by_muon.clone(),
                }
            }
            Part::Scaler(state) => Self::Scaler { state: state.clone() },
            Part::State(StatePart { values, .. }) => {
                Self::State { value: values.clone(), non_finite: values.non_finite() }
            }
            Part::Tensor(_) => Self::Tensor,
            Part::Value(value) => {
                Self::Value { value: value.clone(), non_finite: value.non_finite() }
            }
            Part::Empty => Self::Empty,
            // Unreachable, because `save_as` refuses such parts.
            Part::Unknown(_) => Self::Value { value: Value::None, non_finite: Vec::new() },
        }
    }

    /// Makes the part without its tensors; `None` for a part that is a single tensor.
    fn into_part(self) -> Option<Part> {
        Some(match self {
            Self::Model => Part::Model(BTreeMap::new()),
            Self::Optimizer { param_groups, params_are_numbers, adam_or_adamw, by_muon } => {
                let state = BTreeMap::new();
                Part::Optimizer(OptimizerPart {
                    state,
                    param_groups,
                    params_are_numbers,
                    adam_or_adamw,
                    by_muon,
                    others: BTreeMap::new(),
                })
            }
            Self::Scaler { state } => Part::Scaler(state),
            Self::Value { value, .. } => Part::Value(value),
            Self::Empty => Part::Empty,
            Self::State { value: values, .. } => {
                Part::State(StatePart::new(BTreeMap::new(), values))
            }
            Self::Tensor => return None,
        })
    }
}

/// Only what every version of a manifest has, since a later one may have other fields. The checksum stays where it is:
/// without it, a damaged file could not be told from a later version.
#[derive(Deserialize)]
struct Version {
    format: u32,
    checksum: Option<Checksum>,
}

/// Computes the checksum of a header that contains `own` as its checksum. Returns `None` if it does not contain it.
fn of_header(header: &[u8], own: Checksum) -> Option<Checksum> {
    // The manifest is a JSON string within JSON.
    let field = |checksum: Checksum| format!("\\\"checksum\\\":\\\"{checksum}\\\"").into_bytes();
    let (written, blank) = (field(own), field(Checksum::default()));
    // The first occurrence is the right one: names and values, which may look the same, come after it.
    let place = header.windows(written.len()).position(|window| window == written)?;
    Some(Checksum::of([&header[..place], &blank, &header[place + blank.len()..]]))
}

/// Returns a problem if the manifest's JSON would take too much memory, and `None` otherwise.
fn too_much(manifest: &str, max_values: u64) -> Option<String> {
    if manifest.len() > MAX_MANIFEST_BYTES {
        return Some(format!("has {} bytes, more than {MAX_MANIFEST_BYTES}", manifest.len()));
    }
    let values = most_values(manifest.as_bytes());
    (values > max_values)
        .then(|| format!("has about {values} names and values, more than {max_values}"))
}

/// Returns an upper bound of the number of values in a JSON text, by counting the bytes that start or separate values.
fn most_values(json: &[u8]) -> u64 {
    let (mut count, mut in_text, mut escaped) = (1, false, false);
    for &byte in json {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = in_text,
            b'"' => in_text = !in_text,
            b'[' | b'{' | b',' | b':' if !in_text => count += 1,
            _ => {}
        }
    }
    count
}

/// Makes parts of a safetensors file. A file from another program is a model without checksums.
pub(crate) fn read(file: TorchFile, limits: &Limits) -> Result<Archive> {
    let path = file.path().to_owned();
    let text = file.metadata().get(KEY).cloned();
    let header = header_of(&file)?;
    // The damage may be in the key of the manifest itself.
    if text.is_none() && is_ours(&header) {
        return Err(CheckpointError::damaged(&path, "the key of its metadata is damaged").into());
    }
    let manifest = text.map(|text| manifest_of(&path, Some(&header), &text, limits)).transpose()?;
    drop(header);
    match manifest {
        Some(manifest) => with_manifest(file, manifest),
        None => Ok(read_named(file, limits)),
    }
}

/// Makes parts of several files. The index of those that this crate has saved has a manifest; torch-files compares its
/// checksum, and has those of the tensors. Files from another program are a model.
pub(crate) fn read_index(file: TorchFile, limits: &Limits) -> Result<Archive> {
    let Some(text) = file.metadata().get(KEY) else { return Ok(read_named(file, limits)) };
    let manifest = manifest_of(file.path(), None, text, limits)?;
    with_manifest(file, manifest)
}

/// Makes a model of named tensors.
fn read_named(mut file: TorchFile, limits: &Limits) -> Archive {
    let value = file.take_value();
    let file = Arc::new(file);
    Archive::new(Reader::new(Arc::clone(&file), limits).named(value), file)
}

/// Returns the header without the length before it.
fn header_of(file: &TorchFile) -> Result<Vec<u8>> {
    let failed = CheckpointError::reading(file.path());
    let mut len = [0; LENGTH];
    file.read_bytes(0, &mut len).map_err(&failed)?;
    // The file was opened, so its header is in it.
    let len = u64::from_le_bytes(len).min(file.size_in_bytes());
    let mut header = vec![0; usize::try_from(len).unwrap_or(0)];
    file.read_bytes(LENGTH as u64, &mut header).map_err(&failed)?;
    Ok(header)
}

/// The size in bytes of the length before the header.
const LENGTH: usize = 8;

/// Returns whether a header contains a manifest, under any name.
fn is_ours(header: &[u8]) -> bool {
    let marks: [&[u8]; 2] = [br#"{\"format\":"#, br#"\"writer\":\"tch-amp "#];
    marks.iter().any(|mark| header.windows(mark.len()).any(|window| window == *mark))
}

/// Reads the manifest, and verifies the checksum of the header with it, if it has one.
fn manifest_of(
    path: &Path,
    header: Option<&[u8]>,
    text: &str,
    limits: &Limits,
) -> Result<Manifest> {
    if let Some(problem) = too_much(text, limits.max_values) {
        return Err(CheckpointError::damaged(path, format!("its metadata {problem}")).into());
    }
    let damaged =
        |error: serde_json::Error| CheckpointError::damaged(path, format!("its metadata: {error}"));
    let Version { format, checksum } = serde_json::from_str(text).map_err(damaged)?;
    // Before anything else is believed: a damaged bit must not make a later version of this one.
    let is_intact =
        |checksum| header.is_none_or(|header| of_header(header, checksum) == Some(checksum));
    if !checksum.is_none_or(is_intact) && !cfg!(fuzzing) {
        return Err(
            CheckpointError::damaged(path, "the checksum of its header does not match").into()
        );
    }
    if format > VERSION {
        let (path, found, supported) = (path.to_owned(), format, VERSION);
        return Err(CheckpointError::Newer { path, found, supported }.into());
    }
    Ok(serde_json::from_str(text).map_err(damaged)?)
}

/// Assigns every tensor to its part.
fn with_manifest(mut file: TorchFile, manifest: Manifest) -> Result<Archive> {
    let items = match file.take_value() {
        Value::Dict(items) => items,
        _ => Vec::new(),
    };
    let file = Arc::new(file);
    let damaged = |problem: String| CheckpointError::damaged(file.path(), problem);
    let Manifest { checksums, parts, .. } = manifest;
    if parts.len() > MAX_PARTS {
        return Err(damaged(format!("it has more than {MAX_PARTS} parts")).into());
    }
    let entry = |(name, value): (Value, Value)| match value {
        Value::Tensor(tensor) => {
            let entry = TensorEntry::in_file(&file, &tensor)?;
            Some((name.text()?.to_owned(), tensor, entry))
        }
        _ => None,
    };
    let all = items.len();
    let entries: Vec<_> = items.into_iter().filter_map(entry).collect();
    if entries.len() != all {
        let problem = "it has a tensor of a dtype that tch does not have";
        return Err(damaged(problem.to_owned()).into());
    }
    // Shards have their own.
    if file.kind() == FileKind::Safetensors && checksums.len() != all {
        return Err(damaged("it does not have one checksum for each tensor".to_owned()).into());
    }
    let mut built: BTreeMap<String, Part> =
        parts.into_iter().filter_map(|(name, part)| Some((name, part.into_part()?))).collect();
    let mut checks = Vec::with_capacity(checksums.len());
    let mut checksums = checksums.into_iter();
    for (name, tensor, entry) in entries {
        if !give(&mut built, &name, entry) {
            return Err(damaged(format!("`{}` belongs to no part", shown(&name))).into());
        }
        checks.extend(checksums.next().map(|checksum| (name, *tensor, checksum)));
    }
    Ok(Archive { parts: built, checks, file })
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

type Parts = BTreeMap<String, Part>;

/// The name in errors that concern no single part.
const WHOLE: &str = "the checkpoint";

/// A file that is laid out, except for the checksums.
#[derive(Debug)]
pub(crate) struct Layout<'a> {
    writer: Writer<Hashed<&'a TensorEntry>>,
    manifest: Manifest,
}

impl<'a> Layout<'a> {
    /// Lays out the parts. Returns an error for anything that the format cannot hold.
    pub(crate) fn new(parts: &'a Parts) -> Result<Self> {
        let hashed =
            |(name, entry): (String, &'a TensorEntry)| described(&name, entry, Hashed::new(entry));
        let tensors = named(parts).map(hashed).collect::<Result<Vec<_>>>()?;
        let manifest = Manifest::of(parts, tensors.len())?;
        let writer = Writer::safetensors(tensors, manifest.metadata()?, &Limits::DEFAULT);
        Ok(Self { writer: writer.map_err(unwritable)?, manifest })
    }

    /// Writes the file: the tensors, and then the header with the checksums.
    pub(crate) fn write(&mut self, out: &mut dyn Target) -> io::Result<()> {
        self.writer.write_to(out)?;
        let checksums = self.writer.storages().iter().map(Hashed::checksum);
        self.manifest.checksums = checksums.collect();
        self.sign().map_err(io::Error::other)?;
        self.writer.rewrite_header(out)
    }

    /// Puts the checksums of the tensors and that of the header itself into the header, whose length does not depend on
    /// them.
    fn sign(&mut self) -> Result<()> {
        // A second file can be written with the same layout.
        self.manifest.checksum = Checksum::default();
        self.writer.set_metadata(&self.manifest.metadata()?).map_err(unwritable)?;
        let own = of_header(&self.writer.header()[LENGTH..], self.manifest.checksum);
        self.manifest.checksum =
            own.ok_or_else(|| unsaveable(WHOLE, "its header has no checksum"))?;
        Ok(self.writer.set_metadata(&self.manifest.metadata()?).map_err(unwritable)?)
    }
}

/// Lays out what this rank saves of a checkpoint that several save: the tensors that are here, and on rank 0 the
/// manifest, for the index. The checksums are those of the folder itself.
pub(crate) fn layout_of_share(parts: &Parts, is_first: bool) -> Result<ShardWriter<&TensorEntry>> {
    let here = named(parts).filter(|(_, entry)| entry.is_here());
    let tensors = here.map(|(name, entry)| described(&name, entry, entry));
    let tensors = tensors.collect::<Result<Vec<_>>>()?;
    let metadata = if is_first { Manifest::of(parts, 0)?.metadata()? } else { BTreeMap::new() };
    Ok(ShardWriter::new(tensors, metadata, &Limits::DEFAULT).map_err(unwritable)?)
}

impl Manifest {
    /// Describes the parts, in a file with so many tensors. Returns an error for a part that could not be loaded again.
    fn of(parts: &Parts, tensors: usize) -> Result<Self> {
        let described = |(name, part): (&String, &Part)| (name.clone(), PartManifest::of(part));
        let parts: BTreeMap<_, _> = parts.iter().map(described).collect();
        parts.iter().try_for_each(|(name, part)| read_again(name, part))?;
        let (checksum, checksums) = (Checksum::default(), vec![Checksum::default(); tensors]);
        Ok(Self { format: VERSION, writer: WRITER.to_owned(), checksum, checksums, parts })
    }

    /// Returns the metadata of a file with this manifest.
    fn metadata(&self) -> Result<BTreeMap<String, String>> {
        let refuse = |error: serde_json::Error| unsaveable(WHOLE, error.to_string());
        let manifest = serde_json::to_string(self).map_err(refuse)?;
        if let Some(problem) = too_much(&manifest, Limits::DEFAULT.max_values) {
            let problem = format!("its metadata {problem}; save long values as tensors");
            return Err(unsaveable(WHOLE, problem).into());
        }
        Ok(BTreeMap::from([(KEY.to_owned(), manifest)]))
    }
}

/// Lays out the tensors of a model without a manifest. Returns an error for anything that the format cannot hold.
pub(crate) fn layout_of_weights(
    entries: &BTreeMap<String, TensorEntry>,
) -> Result<Writer<&TensorEntry>> {
    let tensors = entries.iter().map(|(name, entry)| described(name, entry, entry));
    let tensors = tensors.collect::<Result<Vec<_>>>()?;
    // Other programs write this, and transformers requires it.
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    Ok(Writer::safetensors(tensors, metadata, &Limits::DEFAULT).map_err(unwritable)?)
}

/// Describes a tensor, if safetensors has its dtype.
fn described<S>(
    name: &str,
    entry: &TensorEntry,
    storage: S,
) -> Result<(String, Dtype, Vec<i64>, S)> {
    let dtype = dtype_of(entry.kind).filter(|dtype| dtype.safetensors_name().is_some());
    let problem = || format!("safetensors has no {:?}; save it as `.pt`", entry.kind);
    let dtype = dtype.ok_or_else(|| unsaveable(name, problem()))?;
    Ok((name.to_owned(), dtype, entry.size.clone(), storage))
}

/// Makes the error of a file that cannot be laid out.
fn unwritable(error: torch_files::Error) -> CheckpointError {
    match error {
        torch_files::Error::Unwritable { entry, problem } => {
            unsaveable(entry.as_deref().unwrap_or(WHOLE), problem)
        }
        other => unsaveable(WHOLE, other.to_string()),
    }
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

/// Returns all tensors by their names in the file. The slash distinguishes a tensor within a part from a part that is a
/// tensor.
fn named(parts: &Parts) -> impl Iterator<Item = (String, &TensorEntry)> {
    parts.iter().flat_map(|(name, part)| {
        let full = move |tensor: &str| match part {
            Part::Tensor(_) => name.clone(),
            _ => format!("{name}/{tensor}"),
        };
        part.tensors().map(move |(tensor, entry)| (full(&tensor), entry))
    })
}

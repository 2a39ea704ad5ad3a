//! The manifest: what this crate adds to the header of a safetensors file.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3Default;

use crate::checkpoint::archive::Checksum;
use crate::checkpoint::part::{OptimizerPart, Part, StatePart};
use crate::checkpoint::value::Value;
use crate::error::shown;
use crate::optim::ParamGroupState;
use crate::scale::GradScalerState;

/// The only entry of `__metadata__`, so that the bytes of a file do not depend on the order of a hash map.
pub(crate) const KEY: &str = "tch_amp";

/// The version of the format that is written. Later versions are refused, and all earlier ones are read.
pub(crate) const VERSION: u32 = 1;

/// The description that this crate writes in addition to the tensors.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Manifest {
    pub(crate) format: u32,
    /// The version of this crate, for information only.
    pub(crate) writer: String,
    /// The checksum of the header, with zeros in place of the checksum itself.
    pub(crate) checksum: Checksum,
    /// The checksum of each tensor's bytes, in the order of the file.
    pub(crate) checksums: Vec<Checksum>,
    pub(crate) parts: BTreeMap<String, PartManifest>,
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
    pub(crate) fn into_part(self) -> Option<Part> {
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
pub(crate) struct Version {
    pub(crate) format: u32,
    pub(crate) checksum: Option<Checksum>,
}

/// Computes the checksum of a header that contains `own` as its checksum. Returns `None` if it does not contain it.
pub(crate) fn of_header(header: &[u8], own: Checksum) -> Option<Checksum> {
    // The manifest is a JSON string within JSON.
    let field = |checksum: Checksum| format!("\\\"checksum\\\":\\\"{checksum}\\\"").into_bytes();
    let (written, blank) = (field(own), field(Checksum::default()));
    // The first occurrence is the right one: names and values, which may look the same, come after it.
    let place = header.windows(written.len()).position(|window| window == written)?;
    let mut hash = Xxh3Default::new();
    for bytes in [&header[..place], &blank, &header[place + blank.len()..]] {
        hash.update(bytes);
    }
    Some(Checksum(hash.digest()))
}

//! Converts PyTorch's values to the parts of a checkpoint.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{KEY, muon, plain};
use crate::checkpoint::entry::{Entry, Location};
use crate::checkpoint::part::{Part, StatePart};
use crate::checkpoint::pickle::{TensorRef, Value, get};
use crate::checkpoint::plain::Plain;
use crate::checkpoint::source::Source;
use crate::error::{sentence, shown};

pub(super) type Items = [(Value, Value)];
type Parts = BTreeMap<String, Part>;

/// Why the values are not a checkpoint.
pub(super) type Problem = String;

/// Converts values, given where the storages are in the file.
#[derive(Debug)]
pub(crate) struct Reader<'a> {
    pub(crate) source: &'a Arc<Source>,
    pub(crate) offsets: BTreeMap<String, u64>,
}

impl Reader<'_> {
    /// Converts the saved object. A dict of tensors becomes a model named `model`; any other dict has a part under each
    /// key.
    pub(crate) fn parts(&self, root: &Value) -> Result<Parts, Problem> {
        let Value::Dict(items) = root else {
            return Err("it does not hold a dict, so nothing in it has a name".to_owned());
        };
        let ours = get(items, KEY).and_then(plain::from_python);
        if ours.is_none() && is_model(items) {
            let model = self.model(items).ok_or("a tensor in it has no name")?;
            return Ok(BTreeMap::from([("model".to_owned(), model)]));
        }
        let mut parts = BTreeMap::new();
        for (key, value) in items {
            let Some(name) = plain::text(key).filter(|name| name != KEY) else {
                continue;
            };
            let noted = |what: &str| ours.as_ref()?.get(what)?.get(&name);
            let (kind, names) = (noted("parts").and_then(Plain::text), noted("param_names"));
            let part = match kind {
                Some(kind) => self.part_of(kind, value, names),
                None => Ok(self.guess(value)),
            };
            let part = part.map_err(|problem| format!("`{}` in it {problem}", shown(&name)))?;
            parts.insert(name, part);
        }
        Ok(parts)
    }

    /// Converts a part whose kind this crate has recorded in the file.
    fn part_of(&self, kind: &str, value: &Value, names: Option<&Plain>) -> Result<Part, Problem> {
        let part = match (kind, value) {
            ("model", Value::Dict(items)) => self.model(items),
            ("optimizer", Value::Dict(items)) => return self.optimizer(items, names),
            ("scaler", value) => scaler(value),
            ("state", Value::Dict(items)) => self.dict(items),
            ("tensor", Value::Tensor(tensor)) => self.entry(tensor).map(Part::Tensor),
            ("value", value) => plain::from_python(value).map(Part::Value),
            _ => None,
        };
        part.ok_or_else(|| {
            format!("is recorded as a part of the kind {}, but is not one", shown(kind))
        })
    }

    /// Converts a part from a Python program, whose kind is guessed. A part of an unsupported kind does not prevent the
    /// others from being read.
    fn guess(&self, value: &Value) -> Part {
        let has = |items: &Items, key: &str| get(items, key).is_some();
        let part = match value {
            Value::Tensor(tensor) => self.entry(tensor).map(Part::Tensor),
            Value::Dict(items) if has(items, "state") && has(items, "param_groups") => {
                return self.optimizer(items, None).unwrap_or_else(unknown);
            }
            Value::Dict(items) if muon::is_pair(items) => {
                return self.optimizer(items, None).unwrap_or_else(unknown);
            }
            Value::Dict(items) if items.is_empty() => Some(Part::Empty),
            Value::Dict(items) if has(items, "growth_factor") => scaler(value),
            Value::Dict(items) if is_model(items) => self.model(items),
            value => plain::from_python(value).map(Part::Value).or_else(|| self.mixed(value)),
        };
        part.unwrap_or_else(|| Part::Unknown("neither tensors nor JSON values".to_owned()))
    }

    fn model(&self, items: &Items) -> Option<Part> {
        let mut tensors = BTreeMap::new();
        for (key, value) in items {
            match (key, value) {
                (Value::Str(name), Value::Tensor(tensor)) => {
                    tensors.insert(name.clone(), self.entry(tensor)?);
                }
                (Value::Str(_), Value::None) => {}
                _ => return None,
            }
        }
        Some(Part::Model(tensors))
    }

    fn mixed(&self, value: &Value) -> Option<Part> {
        match value {
            Value::Dict(items) => self.dict(items),
            _ => None,
        }
    }

    /// Converts a dict of tensors and values.
    fn dict(&self, items: &Items) -> Option<Part> {
        let (mut tensors, mut values) = (BTreeMap::new(), Vec::new());
        for (key, value) in items {
            let name = plain::text(key)?;
            match value {
                Value::Tensor(tensor) => drop(tensors.insert(name, self.entry(tensor)?)),
                value => values.push((name, plain::from_python(value)?)),
            }
        }
        Some(Part::State(StatePart { tensors, values: Plain::map(values) }))
    }

    pub(super) fn entry(&self, tensor: &TensorRef) -> Option<Entry> {
        let start = self.offsets.get(&tensor.storage)?;
        let width = tensor.kind.elt_size_in_bytes() as u64;
        let offset = start.checked_add(tensor.offset.checked_mul(width)?)?;
        let stride = (!is_in_order(&tensor.size, &tensor.stride)).then(|| tensor.stride.clone());
        let location = Location { source: Arc::clone(self.source), offset, stride };
        Some(Entry::in_file(tensor.kind, tensor.size.clone(), location))
    }
}

/// Whether a dict is the state of a module: it holds tensors, and possibly extra states that are `None`.
fn is_model(items: &Items) -> bool {
    let is_tensor = |value: &Value| matches!(value, Value::Tensor(_));
    items.iter().any(|(_, value)| is_tensor(value))
        && items.iter().all(|(_, value)| is_tensor(value) || *value == Value::None)
}

/// Makes a part of an unsupported kind. The reason may contain text from the file.
fn unknown(why: Problem) -> Part {
    Part::Unknown(sentence(&why))
}

fn scaler(value: &Value) -> Option<Part> {
    plain::from_python(value)?.read().ok().map(Part::Scaler)
}

/// Whether the elements are in row-major order without gaps.
fn is_in_order(size: &[i64], stride: &[i64]) -> bool {
    let mut expected = 1;
    size.contains(&0)
        || size.iter().zip(stride).rev().all(|(&size, &stride)| {
            let fits = size == 1 || stride == expected;
            expected *= size;
            fits
        })
}

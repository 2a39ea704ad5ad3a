//! Converts PyTorch's values to the parts of a checkpoint.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::{KEY, MODULE, muon, plain};
use crate::checkpoint::MAX_PARTS;
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
    source: &'a Arc<Source>,
    offsets: BTreeMap<String, u64>,
    /// How many more parts the file may have.
    left: Cell<usize>,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(source: &'a Arc<Source>, offsets: BTreeMap<String, u64>) -> Self {
        Self { source, offsets, left: Cell::new(MAX_PARTS) }
    }
}

impl Reader<'_> {
    /// Converts the saved object. A single state becomes a part that is named after its kind; any other dict or list has
    /// a part under each key or place.
    pub(crate) fn parts(&self, root: &Value) -> Result<Parts, Problem> {
        let items = match root {
            Value::Dict(items) => items,
            Value::List(items) | Value::Tuple(items) if items.len() <= MAX_LIST => {
                let parts = self.items_of(items);
                let is_state =
                    |part: &Part| !matches!(part, Part::Value(_) | Part::Empty | Part::Unknown(_));
                return match parts.values().any(is_state) {
                    true => Ok(parts),
                    false => Err("it holds a list without a state".to_owned()),
                };
            }
            Value::Tensor(_) => return Ok(self.single("tensor", root)),
            Value::Opaque(what) => return Err(format!("it holds {what}, not a dict")),
            _ => return Err("it does not hold a dict, so nothing in it has a name".to_owned()),
        };
        let ours = get(items, KEY).and_then(plain::from_python);
        if ours.is_none() {
            match kind_of(items) {
                "optimizer" => return Ok(self.single("optimizer", root)),
                "scaler" => return Ok(self.single("scaler", root)),
                "model" => return Ok(self.single(MODEL, root)),
                _ if is_model_with_others(items) => {
                    return self.model_and_others(items).ok_or_else(too_many);
                }
                _ => {}
            }
        }
        self.count(items.len()).ok_or_else(too_many)?;
        let mut parts = BTreeMap::new();
        for (key, value) in items {
            let Some(name) = plain::text(key) else {
                parts.insert(plain::name(key), without_a_name());
                continue;
            };
            if name == KEY {
                continue;
            }
            let noted = |what: &str| ours.as_ref()?.get(what)?.get(&name);
            let (kind, names) = (noted("parts").and_then(Plain::text), noted("param_names"));
            let part = match kind {
                Some("averages") => self.averages(value, noted("averages")),
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
        let part = match value {
            Value::Tensor(tensor) => self.entry(tensor).map(Part::Tensor),
            Value::Dict(items) => match kind_of(items) {
                "optimizer" => Some(self.optimizer(items, None).unwrap_or_else(unknown)),
                "model" => self.model(items).or_else(|| self.dict(items)),
                "empty" => Some(Part::Empty),
                kind => {
                    let scaler = if kind == "scaler" { scaler(value) } else { None };
                    let value = || plain::from_python(value).map(Part::Value);
                    scaler.or_else(value).or_else(|| self.dict(items))
                }
            },
            Value::List(items) | Value::Tuple(items) => {
                plain::from_python(value).map(Part::Value).or_else(|| self.list(items))
            }
            Value::Opaque(what) => return unknown(what.clone().into_owned()),
            value => plain::from_python(value).map(Part::Value),
        };
        part.unwrap_or_else(|| Part::Unknown("neither tensors nor JSON values".to_owned()))
    }

    /// Converts averages of a model, which this crate has written as the state of an `AveragedModel`. `noted` are the
    /// values, and `beside` the names of what is not an average.
    fn averages(&self, value: &Value, noted: Option<&Plain>) -> Result<Part, Problem> {
        let values = noted.and_then(|noted| noted.get("values"));
        let beside = noted.and_then(|noted| noted.get("beside"));
        let beside: Option<BTreeSet<String>> = beside.and_then(|names| names.read().ok());
        let model = match value {
            Value::Dict(items) => self.model(items),
            _ => None,
        };
        match (model, values, beside) {
            (Some(Part::Model(mut all)), Some(values @ Plain::Map(_)), Some(beside)) => {
                all.retain(|name, _| !beside.contains(name));
                let own =
                    |name: String| name.strip_prefix(MODULE).map(str::to_owned).unwrap_or(name);
                let tensors = all.into_iter().map(|(name, entry)| (own(name), entry)).collect();
                Ok(Part::State(StatePart::new(tensors, values.clone())))
            }
            _ => Err("is recorded as averages, but is something else".to_owned()),
        }
    }

    fn single(&self, name: &str, value: &Value) -> Parts {
        BTreeMap::from([(name.to_owned(), self.guess(value))])
    }

    fn items_of(&self, items: &[Value]) -> Parts {
        items.iter().enumerate().map(|(at, item)| (at.to_string(), self.guess(item))).collect()
    }

    /// Converts a list with something other than values in it, if it is short.
    fn list(&self, items: &[Value]) -> Option<Part> {
        if items.len() > MAX_LIST {
            return None;
        }
        self.count(items.len())?;
        Some(Part::model(BTreeMap::new(), self.items_of(items)))
    }

    /// Converts a dict of variables and of other entries, which become parts beside the model. Returns `None` if there are
    /// too many of those.
    fn model_and_others(&self, items: &Items) -> Option<Parts> {
        let (mut tensors, mut unsupported, mut parts) =
            (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        for (key, value) in items {
            let name = plain::name(key);
            match value {
                Value::Tensor(tensor) if is_variable(key, value) => {
                    tensors.extend(self.entry(tensor).map(|entry| (name, entry)));
                    continue;
                }
                _ => self.count(1)?,
            }
            match value {
                Value::Opaque(what) => {
                    unsupported.insert(name.clone(), unknown(what.clone().into_owned()));
                    parts.insert(name, unknown(what.clone().into_owned()));
                }
                value => drop(parts.insert(name, self.guess(value))),
            }
        }
        parts.insert(MODEL.to_owned(), Part::model(tensors, unsupported));
        Some(parts)
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

    /// Converts a dict of tensors, values and other states.
    fn dict(&self, items: &Items) -> Option<Part> {
        let (mut tensors, mut values, mut others) = (BTreeMap::new(), Vec::new(), BTreeMap::new());
        for (key, value) in items {
            let Some(name) = plain::text(key) else {
                others.insert(plain::name(key), without_a_name());
                continue;
            };
            match value {
                Value::Tensor(tensor) => drop(tensors.insert(name, self.entry(tensor)?)),
                value => match self.guess(value) {
                    Part::Value(value) => values.push((name, value)),
                    Part::Empty => values.push((name, Plain::Map(Vec::new()))),
                    other => {
                        self.count(1)?;
                        others.insert(name, other);
                    }
                },
            }
        }
        let state = StatePart::new(tensors, Plain::map(values));
        Some(Part::State(StatePart { others, ..state }))
    }

    /// Counts parts. Returns `None` if there are too many.
    fn count(&self, parts: usize) -> Option<()> {
        self.left.set(self.left.get().checked_sub(parts)?);
        Some(())
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

/// The name of a model that is a file of its own.
const MODEL: &str = "model";

/// The most items that a list may have, unless all of them are values.
const MAX_LIST: usize = 1000;

/// What is under a key that no name of a part or a tensor can be.
fn without_a_name() -> Part {
    Part::Unknown("its key is not a string, a number or None".to_owned())
}

/// Guesses the kind of a dict from its keys.
fn kind_of(items: &Items) -> &'static str {
    let has = |key: &str| get(items, key).is_some();
    match () {
        () if has("state") && has("param_groups") => "optimizer",
        () if muon::is_pair(items) => "optimizer",
        () if items.is_empty() => "empty",
        () if has("growth_factor") && has("backoff_factor") => "scaler",
        () if is_model(items) => "model",
        () => "dict",
    }
}

/// Whether an entry at the top of a file belongs to a model: a tensor with the name of a variable.
fn is_variable(key: &Value, value: &Value) -> bool {
    let is_name = |name: &str| name.contains('.') || ["weight", "bias"].contains(&name);
    matches!((key, value), (Value::Str(name), Value::Tensor(_)) if is_name(name))
}

fn is_model_with_others(items: &Items) -> bool {
    get(items, MODEL).is_none() && items.iter().any(|(key, value)| is_variable(key, value))
}

/// Whether a dict is the state of a module: it holds tensors, and possibly extra states that are `None`.
fn is_model(items: &Items) -> bool {
    let is_tensor = |value: &Value| matches!(value, Value::Tensor(_));
    items.iter().any(|(_, value)| is_tensor(value))
        && items.iter().all(|(_, value)| is_tensor(value) || *value == Value::None)
}

fn too_many() -> Problem {
    format!("it has more than {MAX_PARTS} parts")
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

//! Converts the objects of a file in PyTorch's format to the parts of a checkpoint.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use torch_files::{Limits, TorchFile, Value};

use super::optimizer::{Problem, Tensors, has_groups, is_flat, is_pair};
use super::{Items, KEY, get};
use crate::checkpoint::part::{MAX_PARTS, MODULE, Part, StatePart, UPDATES};
use crate::dtype;
use crate::error::{sentence, shown};
use crate::optim::Saved;

type Parts = BTreeMap<String, Part>;

/// Converts objects, given the file that has their tensors.
#[derive(Debug)]
pub(crate) struct Reader {
    tensors: Tensors,
    /// How many more parts the file may have.
    left: Cell<usize>,
}

impl Reader {
    pub(crate) fn new(file: Arc<TorchFile>, limits: &Limits) -> Self {
        let tensors = Tensors { file, most: limits.max_tensors };
        Self { tensors, left: Cell::new(MAX_PARTS) }
    }

    /// Converts the saved object. A single state becomes a part that is named after its kind; any other dict or list
    /// has a part under each key or place.
    pub(crate) fn parts(&self, root: Value) -> Result<Parts, Problem> {
        match known(root) {
            Value::Dict(items) => self.parts_of(items),
            Value::List(items) | Value::Tuple(items) if items.len() <= MAX_LIST => {
                let parts = self.items_of(items);
                let is_state =
                    |part: &Part| !matches!(part, Part::Value(_) | Part::Empty | Part::Unknown(_));
                match parts.values().any(is_state) {
                    true => Ok(parts),
                    false => Err("it holds a list without a state".to_owned()),
                }
            }
            root @ Value::Tensor(_) => Ok(self.single("tensor", root)),
            Value::Opaque(what) => Err(format!("it holds {what}, not a dict")),
            _ => Err("it does not hold a dict, so nothing in it has a name".to_owned()),
        }
    }

    /// Converts a dict of the tensors of a model in safetensors, or in several files, in which other values can be beside
    /// them.
    pub(crate) fn named(&self, root: Value) -> Parts {
        let items = match root {
            Value::Dict(items) => items,
            _ => Vec::new(),
        };
        let (mut tensors, mut others) = (BTreeMap::new(), BTreeMap::new());
        for (key, value) in items {
            let other = match value {
                Value::Tensor(tensor) => match self.tensors.entry(&tensor) {
                    Some(entry) => {
                        tensors.insert(name_of(&key), entry);
                        continue;
                    }
                    None => no_dtype(tensor.dtype.safetensors_name().unwrap_or_default()),
                },
                other => self.guess(known(other)),
            };
            others.insert(name_of(&key), other);
        }
        BTreeMap::from([(MODEL.to_owned(), Part::model(tensors, others, BTreeMap::new()))])
    }

    fn parts_of(&self, mut items: Vec<(Value, Value)>) -> Result<Parts, Problem> {
        let ours = take_ours(&mut items);
        if ours.is_none() {
            match kind_of(&items) {
                "optimizer" => return Ok(self.single("optimizer", Value::Dict(items))),
                "scaler" => return Ok(self.single("scaler", Value::Dict(items))),
                "scheduler" => return Ok(self.single("scheduler", Value::Dict(items))),
                "model" => return Ok(self.single(MODEL, Value::Dict(items))),
                _ if is_model_with_others(&items) => {
                    return self.model_and_others(items).ok_or_else(too_many);
                }
                _ => {}
            }
        }
        self.count(items.len()).ok_or_else(too_many)?;
        let mut parts = BTreeMap::new();
        for (key, value) in items {
            let Some(name) = key.key_text() else {
                parts.insert(name_of(&key), without_a_name());
                continue;
            };
            if *name == *KEY {
                continue;
            }
            let noted = |what: &str| ours.as_ref()?.get(what)?.get(&name);
            let (kind, names) = (noted("parts").and_then(Value::text), noted("param_names"));
            let part = match kind {
                Some("averages") => self.averages(value, noted("averages")),
                Some(kind) => self.part_of(kind, value, names),
                None => Ok(self.guess(value)),
            };
            let part = part.map_err(|problem| format!("`{}` in it {problem}", shown(&name)))?;
            parts.insert(name.to_string(), part);
        }
        Ok(parts)
    }

    /// Converts a part whose kind this crate has recorded in the file. A Python program may have put something
    /// unsupported in it or in its place, a tensor in that of a number, or None in that of a scaler or an optimizer
    /// that it does not use. Any other part of another kind is an error.
    fn part_of(&self, kind: &str, value: Value, names: Option<&Value>) -> Result<Part, Problem> {
        let part = match (kind, value) {
            ("model", Value::Dict(items)) => self.model(&items).or_else(|| self.dict(items)),
            ("optimizer", Value::Dict(items)) => self.optimizer(items, names),
            ("state", Value::Dict(items)) => self.dict(items),
            ("scaler" | "optimizer", Value::None) => Some(Part::Value(Value::None)),
            ("scaler" | "value", value) => match value.into_plain() {
                Ok(plain) if kind == "scaler" => scaler(&plain),
                Ok(plain) => Some(Part::Value(plain)),
                Err(other) => Some(self.guess(other)),
            },
            ("tensor", other @ Value::Tensor(_)) | (_, other @ Value::Opaque(_)) => {
                Some(self.guess(other))
            }
            _ => None,
        };
        part.ok_or_else(|| {
            format!("is recorded as a part of the kind {}, but is not one", shown(kind))
        })
    }

    /// Converts a part from a Python program, whose kind is guessed. A part of an unsupported kind does not prevent the
    /// others from being read.
    fn guess(&self, value: Value) -> Part {
        let part = match value {
            Value::Tensor(tensor) => self.tensors.entry(&tensor).map(Part::Tensor),
            Value::Dict(items) => self.guess_dict(items),
            Value::Opaque(what) => return unknown(&what),
            Value::List(items) | Value::Tuple(items) if items.iter().any(is_state) => {
                self.list(items)
            }
            value => match value.into_plain() {
                Ok(value) => Some(Part::Value(value)),
                Err(Value::List(items) | Value::Tuple(items)) => self.list(items),
                Err(_) => None,
            },
        };
        part.unwrap_or_else(|| Part::Unknown("neither tensors nor JSON values".to_owned()))
    }

    fn guess_dict(&self, items: Vec<(Value, Value)>) -> Option<Part> {
        let kind = kind_of(&items);
        match kind {
            "optimizer" => self.optimizer(items, None),
            "model" => self.model(&items).or_else(|| self.dict(items)),
            "empty" => Some(Part::Empty),
            kind => match Value::Dict(items).into_plain() {
                Ok(value) => {
                    let scaler = if kind == "scaler" { scaler(&value) } else { None };
                    scaler.or(Some(Part::Value(value)))
                }
                Err(Value::Dict(items)) => self.dict(items),
                Err(_) => None,
            },
        }
    }

    /// Converts an optimizer, and what a Python program has put beside its state. Returns `None` if that is too much.
    fn optimizer(&self, items: Vec<(Value, Value)>, names: Option<&Value>) -> Option<Part> {
        let mut part = match self.tensors.optimizer(&items, names) {
            Ok(part) => part,
            Err(problem) => return Some(unknown(&problem)),
        };
        if is_pair(&items) || is_flat(&items) {
            return Some(Part::Optimizer(part));
        }
        let is_its_own = |key: &Value| matches!(key.text(), Some("state" | "param_groups"));
        for (key, value) in items.into_iter().filter(|(key, _)| !is_its_own(key)) {
            self.count(1)?;
            part.others.insert(name_of(&key), self.guess(value));
        }
        Some(Part::Optimizer(part))
    }

    /// Converts averages of a model, which this crate has written as the state of an `AveragedModel`. `noted` are the
    /// values, and `beside` the names of what is not an average. If a Python program has updated the averages since,
    /// the values no longer hold, and the state is one from Python. So is one with a name with `module.` and without.
    fn averages(&self, value: Value, noted: Option<&Value>) -> Result<Part, Problem> {
        let other = || "is recorded as averages, but is something else".to_owned();
        let items = match value {
            Value::Dict(items) => items,
            Value::Opaque(what) => return Ok(unknown(&what)),
            _ => return Err(other()),
        };
        let noted = |what: &str| noted.and_then(|noted| noted.get(what));
        let values = noted("values").filter(|values| matches!(values, Value::Map(_)));
        let beside = noted("beside").and_then(|names| names.to::<BTreeSet<String>>().ok());
        let (values, beside) = values.zip(beside).ok_or_else(other)?;
        let part = self.model(&items).or_else(|| self.dict(items)).ok_or_else(too_many)?;
        let (tensors, others) = match part {
            Part::Model(tensors) => (tensors, BTreeMap::new()),
            Part::State(StatePart { tensors, values: Value::Map(values), mut others, .. }) => {
                let values = values.into_iter();
                others.extend(values.map(|(name, value)| (name.to_string(), Part::Value(value))));
                (tensors, others)
            }
            part => return Ok(part),
        };
        let updates = tensors.get(UPDATES).filter(|updates| updates.numel() == 1);
        let updates = updates.and_then(|updates| updates.item().ok());
        let is_there = |name: &str| tensors.contains_key(name) || others.contains_key(name);
        let is_plain = |name: &str| !name.starts_with(MODULE) && is_there(name);
        let is_twice = |name: &String| name.strip_prefix(MODULE).is_some_and(is_plain);
        if updates != values.get(UPDATES).and_then(|updates| updates.to().ok())
            || tensors.keys().chain(others.keys()).any(is_twice)
        {
            return Ok(Part::model(tensors, others, BTreeMap::new()));
        }
        let own = |name: String| name.strip_prefix(MODULE).map(str::to_owned).unwrap_or(name);
        let averages = tensors.into_iter().filter(|(name, _)| !beside.contains(name));
        let averages = averages.map(|(name, entry)| (own(name), entry)).collect();
        let others = others.into_iter().map(|(name, other)| (own(name), other)).collect();
        Ok(Part::State(StatePart { others, ..StatePart::new(averages, values.clone()) }))
    }

    fn single(&self, name: &str, value: Value) -> Parts {
        BTreeMap::from([(name.to_owned(), self.guess(value))])
    }

    fn items_of(&self, items: Vec<Value>) -> Parts {
        items.into_iter().enumerate().map(|(at, item)| (at.to_string(), self.guess(item))).collect()
    }

    /// Converts a list with something other than values in it, if it is short.
    fn list(&self, items: Vec<Value>) -> Option<Part> {
        if items.len() > MAX_LIST {
            return None;
        }
        self.count(items.len())?;
        Some(Part::model(BTreeMap::new(), self.items_of(items), BTreeMap::new()))
    }

    /// Converts a dict of variables and of other entries, which become parts beside the model. A tensor among those may
    /// be a variable of the model, too, because only the names of those within layers have a dot. Returns `None` if
    /// there are too many of those.
    fn model_and_others(&self, items: Vec<(Value, Value)>) -> Option<Parts> {
        let mut parts = BTreeMap::new();
        let (mut tensors, mut unsupported, mut maybe) =
            (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        for (key, value) in items {
            let name = name_of(&key);
            match &value {
                Value::Tensor(tensor) if is_variable(&key, &value) => {
                    tensors.extend(self.tensors.entry(tensor).map(|entry| (name, entry)));
                    continue;
                }
                Value::Tensor(tensor) if key.text().is_some() => {
                    maybe.extend(self.tensors.entry(tensor).map(|entry| (name.clone(), entry)));
                }
                Value::Opaque(what) => drop(unsupported.insert(name.clone(), unknown(what))),
                _ => {}
            }
            self.count(1)?;
            parts.insert(name, self.guess(value));
        }
        parts.insert(MODEL.to_owned(), Part::model(tensors, unsupported, maybe));
        Some(parts)
    }

    fn model(&self, items: &Items) -> Option<Part> {
        let mut tensors = BTreeMap::new();
        for (key, value) in items {
            match (key, value) {
                (Value::Text(name), Value::Tensor(tensor)) => {
                    tensors.insert(name.to_string(), self.tensors.entry(tensor)?);
                }
                (Value::Text(_), Value::None) => {}
                _ => return None,
            }
        }
        Some(Part::Model(tensors))
    }

    /// Converts a dict of tensors, values and other states.
    fn dict(&self, items: Vec<(Value, Value)>) -> Option<Part> {
        let (mut tensors, mut values, mut others) = (BTreeMap::new(), Vec::new(), BTreeMap::new());
        for (key, value) in items {
            let Some(name) = key.key_text() else {
                others.insert(name_of(&key), without_a_name());
                continue;
            };
            if let Value::Tensor(tensor) = value {
                tensors.insert(name.to_string(), self.tensors.entry(&tensor)?);
                continue;
            }
            match self.guess(value) {
                Part::Value(value) => values.push((name, value)),
                Part::Empty => values.push((name, Value::Map(Vec::new()))),
                other => {
                    self.count(1)?;
                    others.insert(name.to_string(), other);
                }
            }
        }
        let state = StatePart::new(tensors, Value::map(values));
        Some(Part::State(StatePart { others, ..state }))
    }

    /// Counts parts. Returns `None` if there are too many.
    fn count(&self, parts: usize) -> Option<()> {
        self.left.set(self.left.get().checked_sub(parts)?);
        Some(())
    }
}

/// Replaces the tensors of dtypes that tch does not have by a description.
fn known(value: Value) -> Value {
    match value {
        Value::Tensor(tensor) if dtype::kind_of(tensor.dtype).is_none() => {
            Value::Opaque("a dtype that tch does not have".into())
        }
        Value::List(items) => Value::List(items.into_iter().map(known).collect()),
        Value::Tuple(items) => Value::Tuple(items.into_iter().map(known).collect()),
        Value::Dict(items) => {
            Value::Dict(items.into_iter().map(|(key, item)| (key, known(item))).collect())
        }
        other => other,
    }
}

/// The name of a model that is a file of its own.
const MODEL: &str = "model";

/// The most items that a list may have, unless all of them are values.
const MAX_LIST: usize = 1000;

/// Makes the part of an entry whose key cannot be a name.
fn without_a_name() -> Part {
    Part::Unknown("its key is not a string, a number or None".to_owned())
}

/// Guesses the kind of a dict from its keys.
fn kind_of(items: &Items) -> &'static str {
    let has = |key: &str| get(items, key).is_some();
    match () {
        () if has("state") && has("param_groups") || has_groups(items) => "optimizer",
        () if is_pair(items) || is_flat(items) => "optimizer",
        () if items.is_empty() => "empty",
        () if has("growth_factor") && has("backoff_factor") => "scaler",
        // Those of a chain count no steps themselves.
        () if has("_last_lr") && (has("last_epoch") || has("_schedulers")) => "scheduler",
        () if is_model(items) => "model",
        () => "dict",
    }
}

/// Returns whether an item of a list is a state of a kind with a layout of its own, which may have no tensor, such as
/// that of SGD without momentum.
fn is_state(item: &Value) -> bool {
    matches!(item, Value::Dict(items) if ["optimizer", "scaler"].contains(&kind_of(items)))
}

/// Returns whether an entry at the top of a file belongs to a model: a tensor with the name of a variable.
fn is_variable(key: &Value, value: &Value) -> bool {
    let is_name = |name: &str| name.contains('.') || ["weight", "bias"].contains(&name);
    matches!((key, value), (Value::Text(name), Value::Tensor(_)) if is_name(name))
}

fn is_model_with_others(items: &Items) -> bool {
    get(items, MODEL).is_none() && items.iter().any(|(key, value)| is_variable(key, value))
}

/// Returns whether a dict is the state of a module: it holds tensors, and possibly extra states that are `None`.
fn is_model(items: &Items) -> bool {
    let is_tensor = |value: &Value| matches!(value, Value::Tensor(_));
    items.iter().any(|(_, value)| is_tensor(value))
        && items.iter().all(|(_, value)| is_tensor(value) || *value == Value::None)
}

fn too_many() -> Problem {
    format!("it has more than {MAX_PARTS} parts")
}

/// Makes the part of a tensor in safetensors whose dtype tch does not have.
fn no_dtype(name: &str) -> Part {
    Part::Unknown(format!("tch has no dtype {}", shown(name)))
}

/// Makes a part of an unsupported kind. The reason may contain text from the file.
fn unknown(why: &str) -> Part {
    Part::Unknown(sentence(why))
}

fn scaler(value: &Value) -> Option<Part> {
    value.to().ok().map(Part::Scaler)
}

/// Takes what this crate has recorded from the items of a saved dict, if it has saved the file.
fn take_ours(items: &mut Vec<(Value, Value)>) -> Option<Value> {
    let at = items.iter().position(|(key, _)| key.text() == Some(KEY))?;
    let (key, value) = items.remove(at);
    let plain = value.into_plain();
    plain.map_err(|value| items.insert(at, (key, value))).ok()
}

/// Returns the name of what is under a key: that of a key which is not text, a number or `None` says what it is.
fn name_of(key: &Value) -> String {
    let what = match key {
        Value::Tuple(_) => "a tuple",
        Value::Tensor(_) => "a tensor",
        Value::Opaque(what) => what,
        _ => "an object",
    };
    key.key_text().map_or_else(|| format!("(the key is {what})"), |text| text.to_string())
}

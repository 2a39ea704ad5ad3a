//! From PyTorch's values to the parts of a checkpoint.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::Arc;

use tch::Tensor;

use super::{KEY, groups, json};
use crate::checkpoint::entry::{Entry, Location};
use crate::checkpoint::part::{OptimizerPart, Part};
use crate::checkpoint::source::Source;
use crate::checkpoint::torch::{TensorRef, Value, get};
use crate::optim::ParamGroupState;

type Items = [(Value, Value)];
type Parts = BTreeMap<String, Part>;

/// Why the values are not a checkpoint.
type Problem = String;

/// Where the storages lie.
#[derive(Debug)]
pub(super) struct Reader<'a> {
    pub(super) source: &'a Arc<Source>,
    pub(super) offsets: BTreeMap<String, u64>,
}

impl Reader<'_> {
    /// A dict of tensors is the model `model`; any other has its parts under their names.
    pub(super) fn parts(&self, root: &Value) -> Result<Parts, Problem> {
        let Value::Dict(items) = root else {
            return Err("it holds no dict, so that nothing in it has a name".to_owned());
        };
        let kinds = get(items, KEY).and_then(json::from_python);
        let is_model =
            !items.is_empty() && items.iter().all(|(_, v)| matches!(v, Value::Tensor(_)));
        if kinds.is_none() && is_model {
            let model = self.model(items).ok_or("a tensor in it has no name")?;
            return Ok(BTreeMap::from([("model".to_owned(), model)]));
        }
        let mut parts = BTreeMap::new();
        for (key, value) in items {
            let Some(name) = json::text(key).filter(|name| name != KEY) else {
                continue;
            };
            let kind = kinds.as_ref().and_then(|kinds| kinds["parts"][&name].as_str());
            let part = match kind {
                Some(kind) => self.part_of(kind, value),
                None => Ok(self.guess(value)),
            };
            let part = part.map_err(|problem| format!("`{name}` in it {problem}"))?;
            parts.insert(name, part);
        }
        Ok(parts)
    }

    /// A part whose kind this crate has noted.
    fn part_of(&self, kind: &str, value: &Value) -> Result<Part, Problem> {
        let part = match (kind, value) {
            ("model", Value::Dict(items)) => self.model(items),
            ("optimizer", Value::Dict(items)) => return self.optimizer(items),
            ("scaler", value) => scaler(value),
            ("tensor", Value::Tensor(tensor)) => self.entry(tensor).map(Part::Tensor),
            ("value", value) => json::from_python(value).map(Part::Value),
            _ => None,
        };
        part.ok_or_else(|| format!("is not the {kind} that it says it is"))
    }

    /// A part of a Python program's. What is none of the kinds here does not keep the others from being read.
    fn guess(&self, value: &Value) -> Part {
        let has = |items: &Items, key: &str| get(items, key).is_some();
        let part = match value {
            Value::Tensor(tensor) => self.entry(tensor).map(Part::Tensor),
            Value::Dict(items) if has(items, "state") && has(items, "param_groups") => {
                return self.optimizer(items).unwrap_or_else(Part::Unknown);
            }
            Value::Dict(items) if items.is_empty() || has(items, "growth_factor") => scaler(value),
            Value::Dict(items) if items.iter().all(|(_, v)| matches!(v, Value::Tensor(_))) => {
                self.model(items)
            }
            value => json::from_python(value).map(Part::Value),
        };
        part.unwrap_or_else(|| Part::Unknown("neither tensors nor JSON".to_owned()))
    }

    fn model(&self, items: &Items) -> Option<Part> {
        let mut tensors = BTreeMap::new();
        for (key, value) in items {
            let (Value::Str(name), Value::Tensor(tensor)) = (key, value) else {
                return None;
            };
            tensors.insert(name.clone(), self.entry(tensor)?);
        }
        Some(Part::Model(tensors))
    }

    fn optimizer(&self, items: &Items) -> Result<Part, Problem> {
        let (Some(Value::Dict(state)), Some(Value::List(groups))) =
            (get(items, "state"), get(items, "param_groups"))
        else {
            return Err("is not an optimizer".to_owned());
        };
        let mut names = BTreeMap::new();
        let mut param_groups = Vec::with_capacity(groups.len());
        for group in groups {
            let (group, numbers) = group_of(group)?;
            names.extend(numbers.into_iter().zip(group.params.iter().cloned()));
            param_groups.push(group);
        }
        let params_are_numbers = names.iter().any(|(number, name)| number.to_string() == *name);
        let mut entries = BTreeMap::new();
        for (key, tensors) in state {
            let name = match key {
                Value::Int(number) => names.get(number).cloned(),
                _ => None,
            };
            let (Some(name), Value::Dict(tensors)) = (name, tensors) else {
                return Err("has a state of a parameter that is in no group".to_owned());
            };
            entries.insert(name, self.state(tensors)?);
        }
        let adam_or_adamw = groups.iter().any(groups::may_be_adamw);
        Ok(Part::Optimizer(OptimizerPart {
            state: entries,
            param_groups,
            params_are_numbers,
            adam_or_adamw,
        }))
    }

    /// The state of one parameter. What is not there yet is `None` in PyTorch.
    fn state(&self, tensors: &Items) -> Result<BTreeMap<String, Entry>, Problem> {
        let mut entries = BTreeMap::new();
        for (key, value) in tensors {
            let number = |value: f64| Entry::in_memory(&Tensor::from(value as f32)).ok();
            let entry = match value {
                Value::None => continue,
                Value::Tensor(tensor) => self.entry(tensor),
                // Older versions of PyTorch count steps like that.
                Value::Int(value) => number(*value as f64),
                Value::Float(value) => number(*value),
                _ => None,
            };
            let (Value::Str(key), Some(entry)) = (key, entry) else {
                return Err("has something other than tensors in a parameter's state".to_owned());
            };
            entries.insert(key.clone(), entry);
        }
        Ok(entries)
    }

    fn entry(&self, tensor: &TensorRef) -> Option<Entry> {
        let start = self.offsets.get(&tensor.storage)?;
        let width = tensor.kind.elt_size_in_bytes() as u64;
        let offset = start.checked_add(tensor.offset.checked_mul(width)?)?;
        let stride = (!is_in_order(&tensor.size, &tensor.stride)).then(|| tensor.stride.clone());
        let location = Location { source: Arc::clone(self.source), offset, stride };
        Some(Entry::in_file(tensor.kind, tensor.size.clone(), location))
    }
}

/// A group with the names of its parameters, and their numbers.
fn group_of(group: &Value) -> Result<(ParamGroupState, Vec<i64>), Problem> {
    let Value::Dict(items) = group else {
        return Err("has a group that is not a dict".to_owned());
    };
    let list = |key: &str| match get(items, key) {
        Some(Value::List(list)) => Some(list),
        _ => None,
    };
    let numbers = list("params").ok_or("has a group without parameters")?;
    let numbers = numbers.iter().map(|number| match number {
        Value::Int(number) => Ok(*number),
        _ => Err("has a parameter without a number".to_owned()),
    });
    let numbers = numbers.collect::<Result<Vec<_>, _>>()?;
    let names = list("param_names").filter(|names| names.len() == numbers.len());
    let names = names.and_then(|names| names.iter().map(json::text).collect::<Option<Vec<_>>>());
    let params = names.unwrap_or_else(|| numbers.iter().map(i64::to_string).collect());
    let options =
        groups::from_python(items).map_err(|problem| format!("its param_groups {problem}"))?;
    Ok((ParamGroupState { options, params }, numbers))
}

fn scaler(value: &Value) -> Option<Part> {
    let state = serde_json::from_value(json::from_python(value)?);
    state.ok().map(Part::Scaler)
}

/// Whether the elements lie in row-major order without gaps.
fn is_in_order(size: &[i64], stride: &[i64]) -> bool {
    let mut expected = 1;
    size.contains(&0)
        || size.iter().zip(stride).rev().all(|(&size, &stride)| {
            let fits = size == 1 || stride == expected;
            expected *= size;
            fits
        })
}

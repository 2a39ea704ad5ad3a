//! Writing a file of PyTorch's.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::io::{self, BufWriter};

use super::{KEY, groups, json};
use crate::checkpoint::WRITER;
use crate::checkpoint::atomic::Target;
use crate::checkpoint::entry::Entry;
use crate::checkpoint::error::unsaveable;
use crate::checkpoint::part::{OptimizerPart, Part};
use crate::checkpoint::save::interrupted;
use crate::checkpoint::torch::{TensorRef, Value, save};
use crate::error::{Error, Result};

const TOO_LARGE: &str = "it has a number of 2^63 or more; save it as text, or as safetensors";

/// What is going to be written.
#[derive(Debug)]
pub(crate) struct Plan<'a> {
    root: Value,
    storages: Vec<&'a Entry>,
}

impl<'a> Plan<'a> {
    /// Refuses what Python cannot have.
    pub(crate) fn new(parts: &'a BTreeMap<String, Part>) -> Result<Self> {
        let mut plan = Self { root: Value::None, storages: Vec::new() };
        let mut root = Vec::with_capacity(parts.len() + 1);
        let mut kinds = serde_json::Map::new();
        for (name, part) in parts {
            let refuse = |problem: &str| Error::from(unsaveable(name, problem));
            let (kind, value) = match part {
                Part::Model(tensors) => ("model", plan.model(tensors)),
                Part::Optimizer(part) => ("optimizer", plan.optimizer(part)),
                Part::Scaler(state) => {
                    let state = serde_json::to_value(state).ok();
                    let state = state.as_ref().and_then(json::to_python);
                    ("scaler", state.ok_or_else(|| refuse("its state is not JSON"))?)
                }
                Part::Tensor(entry) => ("tensor", plan.tensor(entry)),
                Part::Value(value) => {
                    let value = json::to_python(value);
                    ("value", value.ok_or_else(|| refuse(TOO_LARGE))?)
                }
                // Refused in `save_as`.
                Part::Unknown(_) => continue,
            };
            root.push((name.as_str().into(), value));
            kinds.insert(name.clone(), kind.into());
        }
        let ours = serde_json::json!({
            "writer": WRITER,
            "parts": kinds,
        });
        let ours = json::to_python(&ours).unwrap_or(Value::None);
        root.push((KEY.into(), ours));
        plan.root = Value::Dict(root);
        Ok(plan)
    }

    fn model(&mut self, tensors: &'a BTreeMap<String, Entry>) -> Value {
        let items = tensors.iter().map(|(name, entry)| (name.as_str().into(), self.tensor(entry)));
        Value::Dict(items.collect())
    }

    /// PyTorch numbers the parameters through all groups, and may keep their names beside.
    fn optimizer(&mut self, part: &'a OptimizerPart) -> Value {
        let mut state = Vec::new();
        let mut param_groups = Vec::new();
        let mut number = 0;
        for group in &part.param_groups {
            let mut numbers = Vec::with_capacity(group.params.len());
            for name in &group.params {
                if let Some(entries) = part.state.get(name) {
                    let entries = entries
                        .iter()
                        .map(|(key, entry)| (key.as_str().into(), self.tensor(entry)));
                    state.push((Value::Int(number), Value::Dict(entries.collect())));
                }
                numbers.push(Value::Int(number));
                number += 1;
            }
            let mut items = groups::to_python(&group.options);
            items.push(("params".into(), Value::List(numbers)));
            if !part.params_are_numbers {
                let names = group.params.iter().map(|name| name.as_str().into()).collect();
                items.push(("param_names".into(), Value::List(names)));
            }
            param_groups.push(Value::Dict(items));
        }
        Value::Dict(vec![
            ("state".into(), Value::Dict(state)),
            ("param_groups".into(), Value::List(param_groups)),
        ])
    }

    /// Each tensor has a storage of its own.
    fn tensor(&mut self, entry: &'a Entry) -> Value {
        let storage = self.storages.len().to_string();
        self.storages.push(entry);
        let mut stride = vec![1; entry.size.len()];
        for dim in (1..stride.len()).rev() {
            stride[dim - 1] = stride[dim] * entry.size[dim].max(1);
        }
        let size = entry.size.clone();
        let kind = entry.kind;
        Value::Tensor(TensorRef { storage, kind, offset: 0, size, stride, requires_grad: false })
    }
}

/// Writes the archive.
pub(crate) fn write(
    plan: &Plan<'_>,
    out: &mut dyn Target,
    failed: &mut dyn FnMut(Error) -> io::Error,
) -> io::Result<()> {
    let key = |(index, entry): (usize, &&Entry)| (index.to_string(), entry.len() as u64);
    let storages: Vec<_> = plan.storages.iter().enumerate().map(key).collect();
    let out = save(BufWriter::new(out), &plan.root, &storages, &mut |index, out| {
        let read =
            plan.storages[index].read(&mut |bytes| out.write_all(bytes).map_err(interrupted));
        read.map_err(&mut *failed)
    })?;
    out.into_inner().map_err(io::IntoInnerError::into_error)?.flush()
}

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
use crate::checkpoint::torch::{self, TensorRef, Value, save};
use crate::error::{Error, Result};

/// What is going to be written.
#[derive(Debug)]
pub(crate) struct Plan<'a> {
    root: Value,
    storages: Vec<&'a Entry>,
}

impl<'a> Plan<'a> {
    /// Refuses what Python cannot have, and what could not be loaded again.
    pub(crate) fn new(parts: &'a BTreeMap<String, Part>) -> Result<Self> {
        let mut plan = Self { root: Value::None, storages: Vec::new() };
        let mut root = Vec::with_capacity(parts.len() + 1);
        let mut kinds = serde_json::Map::new();
        let mut names = serde_json::Map::new();
        for (name, part) in parts {
            let Some((kind, value)) = plan.part(part) else {
                return Err(unsaveable(name, "it is not JSON of numbers that Python has").into());
            };
            root.push((name.as_str().into(), value));
            if let Some(kind) = kind {
                kinds.insert(name.clone(), kind.into());
            }
            if let Part::Optimizer(OptimizerPart { param_groups, .. }) = part {
                let params = param_groups.iter().map(|group| group.params.as_slice());
                names.insert(name.clone(), params.collect());
            }
        }
        let ours = serde_json::json!({ "writer": WRITER, "parts": kinds, "param_names": names });
        root.push((KEY.into(), json::to_python(&ours).unwrap_or(Value::None)));
        plan.root = Value::Dict(root);
        if let Err(problem) = torch::check(&plan.root, &plan.lengths()) {
            let problem = format!("{problem}; save long values as tensors");
            return Err(unsaveable("the checkpoint", problem).into());
        }
        Ok(plan)
    }

    /// The keys and bytes of the storages.
    fn lengths(&self) -> Vec<(String, u64)> {
        let key = |(index, entry): (usize, &&Entry)| (index.to_string(), entry.len() as u64);
        self.storages.iter().enumerate().map(key).collect()
    }

    /// What the part is and its value; `None` if Python has no such value.
    fn part(&mut self, part: &'a Part) -> Option<(Option<&'static str>, Value)> {
        Some(match part {
            Part::Model(tensors) => (Some("model"), self.model(tensors)),
            Part::Optimizer(part) => (Some("optimizer"), self.optimizer(part)),
            Part::Scaler(state) => {
                let state = serde_json::to_value(state).ok()?;
                (Some("scaler"), json::to_python(&state)?)
            }
            Part::Tensor(entry) => (Some("tensor"), self.tensor(entry)),
            Part::Value(value) => (Some("value"), json::to_python(value)?),
            Part::Empty => (None, Value::Dict(Vec::new())),
            // Refused in `save_as`.
            Part::Unknown(_) => return None,
        })
    }

    fn model(&mut self, tensors: &'a BTreeMap<String, Entry>) -> Value {
        let items = tensors.iter().map(|(name, entry)| (name.as_str().into(), self.tensor(entry)));
        Value::Dict(items.collect())
    }

    /// PyTorch numbers the parameters through all groups. Their names stand at the root: beside the numbers they would
    /// keep Python from adding groups without names.
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
    let out = save(BufWriter::new(out), &plan.root, &plan.lengths(), &mut |index, out| {
        let read =
            plan.storages[index].read(&mut |bytes| out.write_all(bytes).map_err(interrupted));
        read.map_err(&mut *failed)
    })?;
    out.into_inner().map_err(io::IntoInnerError::into_error)?.flush()
}

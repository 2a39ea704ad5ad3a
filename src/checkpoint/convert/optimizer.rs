//! Converts the states of PyTorch's optimizers.
//!
//! PyTorch numbers the parameters through all groups. Names are taken from those that this crate has recorded, or from
//! the `param_names` of a group; without either, the numbers remain and are matched by position when the state is
//! restored.

use std::collections::BTreeMap;

use super::from::{Items, Problem, Reader};
use super::{groups, muon, plain};
use crate::checkpoint::MAX_TENSORS;
use crate::checkpoint::entry::Entry;
use crate::checkpoint::part::{OptimizerPart, Part};
use crate::checkpoint::pickle::{TensorRef, Value, get};
use crate::checkpoint::plain::Plain;
use crate::optim::{Algorithm, ParamGroup, ParamGroupState, Saved as _};

/// A parameter group in PyTorch's layout.
pub(super) struct Group {
    pub(super) options: ParamGroup,
    pub(super) numbers: Vec<i64>,
    /// In the order of the numbers.
    names: Option<Vec<String>>,
    may_be_adamw: bool,
}

/// Returns the names of the parameters in each group, which this crate or PyTorch has saved in addition to the numbers;
/// `None` if there are none, or their counts are not those of the groups.
pub(super) fn names_of(groups: &[Group], noted: Option<&Plain>) -> Option<Vec<Vec<String>>> {
    let noted = noted.and_then(|names| names.read().ok());
    let beside = || groups.iter().map(|group| group.names.clone()).collect();
    let fit = |names: &Vec<Vec<String>>| {
        names.iter().map(Vec::len).eq(groups.iter().map(|group| group.numbers.len()))
    };
    noted.or_else(beside).filter(fit)
}

/// The numbers of the parameters in each group as names, plus `offset`.
pub(super) fn numbered(groups: &[Group], offset: i64) -> Vec<Vec<String>> {
    let names = |group: &Group| {
        group.numbers.iter().map(|number| number.saturating_add(offset).to_string()).collect()
    };
    groups.iter().map(names).collect()
}

impl Reader<'_> {
    /// Converts an optimizer. `names` are those of the parameters in each group, if this crate has recorded them.
    pub(super) fn optimizer(&self, items: &Items, names: Option<&Plain>) -> Result<Part, Problem> {
        if muon::is_pair(items) {
            return self.muon_and_adamw(items, names);
        }
        let groups = self.groups(items)?;
        let names = names_of(&groups, names);
        let params_are_numbers = names.is_none();
        let names = names.unwrap_or_else(|| numbered(&groups, 0));
        let state = self.states(items, &groups, &names)?;
        let adam_or_adamw = groups.iter().any(|group| group.may_be_adamw);
        let options = groups.iter().map(|group| group.options).zip(names);
        let param_groups: Vec<_> =
            options.map(|(options, params)| ParamGroupState { options, params }).collect();
        let is_muon =
            |group: &&ParamGroupState| matches!(group.options.algorithm, Algorithm::Muon(_));
        let by_muon = param_groups.iter().filter(is_muon).flat_map(|group| group.params.clone());
        Ok(Part::Optimizer(OptimizerPart {
            by_muon: by_muon.collect(),
            state,
            param_groups,
            params_are_numbers,
            adam_or_adamw,
        }))
    }

    /// Converts the groups of a state dict.
    pub(super) fn groups(&self, items: &Items) -> Result<Vec<Group>, Problem> {
        match get(items, "param_groups") {
            Some(Value::List(groups)) => {
                let groups: Vec<_> =
                    groups.iter().map(|group| self.group(group)).collect::<Result<_, _>>()?;
                let count: usize = groups.iter().map(|group| group.numbers.len()).sum();
                if count > MAX_TENSORS {
                    return Err(format!("has {count} parameters, more than {MAX_TENSORS}"));
                }
                Ok(groups)
            }
            _ => Err("is not an optimizer".to_owned()),
        }
    }

    /// Converts the tensors of a state dict, by the names of the parameters in its groups.
    pub(super) fn states(
        &self,
        items: &Items,
        groups: &[Group],
        names: &[Vec<String>],
    ) -> Result<BTreeMap<String, BTreeMap<String, Box<Entry>>>, Problem> {
        let Some(Value::Dict(state)) = get(items, "state") else {
            return Err("is not an optimizer".to_owned());
        };
        let numbers = groups.iter().flat_map(|group| &group.numbers);
        let by_number: BTreeMap<_, _> = numbers.zip(names.iter().flatten()).collect();
        let mut entries = BTreeMap::new();
        for (key, tensors) in state {
            let name = match key {
                Value::Int(number) => by_number.get(number),
                _ => None,
            };
            let (Some(name), Value::Dict(tensors)) = (name, tensors) else {
                return Err("has a state of a parameter that is in no group".to_owned());
            };
            entries.insert(String::clone(name), self.state(tensors)?);
        }
        Ok(entries)
    }

    fn group(&self, group: &Value) -> Result<Group, Problem> {
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
        let names = list("param_names");
        let names = names.and_then(|names| names.iter().map(plain::text).collect());
        // A learning rate can be a tensor, so that `torch.compile` does not treat it as a constant.
        let plain = items.iter().filter(|(key, _)| !groups::is_list_of_parameters(key));
        let plain: Vec<_> = plain.map(|(key, value)| (key.clone(), self.number(value))).collect();
        let options =
            groups::from_python(&plain).map_err(|problem| format!("its param_groups {problem}"))?;
        Ok(Group { options, numbers, names, may_be_adamw: groups::may_be_adamw(items) })
    }

    /// Returns the number in a tensor of one element, and any other value as it is.
    fn number(&self, value: &Value) -> Value {
        let number = |tensor: &TensorRef| {
            let single = tensor.size.iter().all(|&size| size == 1);
            self.entry(tensor).filter(|_| single)?.item().ok().map(Value::Float)
        };
        match value {
            Value::Tensor(tensor) => number(tensor).unwrap_or_else(|| value.clone()),
            value => value.clone(),
        }
    }

    /// Converts the state of one parameter. Tensors that do not exist yet are `None` in PyTorch.
    fn state(&self, tensors: &Items) -> Result<BTreeMap<String, Box<Entry>>, Problem> {
        let mut entries = BTreeMap::new();
        for (key, value) in tensors {
            let entry = match value {
                Value::None => continue,
                Value::Tensor(tensor) => self.entry(tensor),
                // Older versions of PyTorch keep the step as a number.
                Value::Int(value) => Some(Entry::number(*value as f32)),
                Value::Float(value) => Some(Entry::number(*value as f32)),
                _ => None,
            };
            let (Value::Str(key), Some(entry)) = (key, entry) else {
                return Err("has something other than tensors in a parameter's state".to_owned());
            };
            entries.insert(key.clone(), Box::new(entry));
        }
        Ok(entries)
    }
}

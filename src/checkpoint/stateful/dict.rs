//! A part of a checkpoint as a dict.

use std::collections::BTreeMap;

use crate::checkpoint::entry::Entry;
use crate::checkpoint::part::{Item, Part, StatePart};
use crate::checkpoint::restore::Options;
use crate::checkpoint::value::{Text, Value};
use crate::checkpoint::{Checkpoint, other_part};
use crate::error::Result;

/// The tensors and values of a part.
pub(super) struct Dict<'a> {
    /// By their names in the target, each with its name in the checkpoint.
    pub(super) tensors: BTreeMap<String, (&'a str, &'a Entry)>,
    /// Tensors that count only if they are asked for.
    maybe: BTreeMap<String, (&'a str, &'a Entry)>,
    /// Sorted by name.
    values: &'a [(Text, Value)],
    /// What is neither, by names like those of the tensors.
    others: BTreeMap<String, (&'a str, &'a Part)>,
}

impl<'a> Dict<'a> {
    /// Reads a part as a dict, and returns an error if it is not one.
    pub(super) fn of(checkpoint: &'a Checkpoint, name: &str, options: &Options) -> Result<Self> {
        const NONE: &BTreeMap<String, Entry> = &BTreeMap::new();
        const NO_OTHERS: &BTreeMap<String, Part> = &BTreeMap::new();
        let (entries, values, others, more): (_, &[_], _, _) = match checkpoint.find(name)? {
            Item::Part(Part::Model(tensors)) => (tensors, &[], NO_OTHERS, NONE),
            Item::Part(Part::State(StatePart {
                tensors,
                values: Value::Map(values),
                others,
                maybe,
                ..
            })) => (tensors, values, others, maybe),
            Item::Part(Part::Value(Value::Map(values))) | Item::Value(Value::Map(values)) => {
                (NONE, values, NO_OTHERS, NONE)
            }
            Item::Part(Part::Empty) => (NONE, &[], NO_OTHERS, NONE),
            other => return Err(other_part(name, "a state", other)),
        };
        let names = entries.keys().chain(others.keys()).chain(more.keys());
        let renamed = options.names.renamed(name, names)?;
        let (mut tensors, mut left, mut maybe) =
            (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        for (here, saved) in renamed {
            if let Some(entry) = entries.get(saved) {
                tensors.insert(here, (saved, entry));
            } else if let Some(other) = others.get(saved) {
                left.insert(here, (saved, other));
            } else if let Some(entry) = more.get(saved) {
                maybe.insert(here, (saved, entry));
            }
        }
        Ok(Self { tensors, maybe, values, others: left })
    }

    /// Removes a prefix from the names of the tensors that have it.
    pub(super) fn remove_prefix(&mut self, prefix: &str) {
        let old = std::mem::take(&mut self.tensors);
        let plain = |name: String| name.strip_prefix(prefix).map(str::to_owned).unwrap_or(name);
        self.tensors = old.into_iter().map(|(name, saved)| (plain(name), saved)).collect();
    }

    /// Returns a tensor by its name in the target, with that and its name in the checkpoint.
    pub(super) fn tensor(&self, name: &str) -> Option<(&String, &(&'a str, &'a Entry))> {
        self.tensors.get_key_value(name).or_else(|| self.maybe.get_key_value(name))
    }

    /// Returns what is under a name that no tensor has.
    pub(super) fn other(&self, name: &str) -> Option<Item<'a>> {
        let other = self.others.get(name).map(|(_, part)| Item::Part(part));
        other.or_else(|| self.value(name).map(Item::Value))
    }

    /// Whether there is a single number under a name.
    pub(super) fn is_number(&self, name: &str) -> bool {
        let number =
            |value: &Value| matches!(value, Value::Int(_) | Value::Uint(_) | Value::Float(_));
        self.tensors.get(name).is_some_and(|(_, entry)| entry.numel() == 1)
            || self.value(name).is_some_and(number)
    }

    pub(super) fn value(&self, name: &str) -> Option<&'a Value> {
        let found = self.values.binary_search_by(|(key, _)| (**key).cmp(name));
        found.ok().map(|at| &self.values[at].1)
    }

    /// The names of the tensors in the target, each with the name in the checkpoint.
    pub(super) fn tensor_names(&self) -> impl Iterator<Item = (&str, &str)> {
        self.tensors.iter().map(|(here, (saved, _))| (here.as_str(), *saved))
    }

    /// The names of the values.
    pub(super) fn value_names(&self) -> impl Iterator<Item = (&str, &str)> {
        self.values.iter().map(|(name, _)| (&**name, &**name))
    }

    /// The names of the others, as in [`tensor_names`](Self::tensor_names).
    pub(super) fn other_names(&self) -> impl Iterator<Item = (&str, &str)> {
        self.others.iter().map(|(here, (saved, _))| (here.as_str(), *saved))
    }
}

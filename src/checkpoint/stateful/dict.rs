//! A part of a checkpoint as a dict.

use std::collections::BTreeMap;

use crate::checkpoint::entry::Entry;
use crate::checkpoint::part::{Part, StatePart};
use crate::checkpoint::plain::Plain;
use crate::checkpoint::restore::Options;
use crate::checkpoint::{Checkpoint, other_part};
use crate::error::Result;

/// The tensors and values of a part.
pub(super) struct Dict<'a> {
    /// By their names in the target, each with its name in the checkpoint.
    pub(super) tensors: BTreeMap<String, (&'a str, &'a Entry)>,
    /// Sorted by name.
    values: &'a [(String, Plain)],
}

impl<'a> Dict<'a> {
    /// Reads a part as a dict, and returns an error if it is not one.
    pub(super) fn of(checkpoint: &'a Checkpoint, name: &str, options: &Options) -> Result<Self> {
        const NONE: &BTreeMap<String, Entry> = &BTreeMap::new();
        let (entries, values): (_, &[_]) = match checkpoint.part(name)? {
            Part::Model(tensors) => (tensors, &[]),
            Part::State(StatePart { tensors, values: Plain::Map(values) }) => (tensors, values),
            Part::Value(Plain::Map(values)) => (NONE, values),
            Part::Empty => (NONE, &[]),
            other => return Err(other_part(name, "a state", other)),
        };
        let renamed = options.names.renamed(name, entries.keys())?;
        let tensors = renamed.into_iter().map(|(here, saved)| (here, (saved, &entries[saved])));
        Ok(Self { tensors: tensors.collect(), values })
    }

    pub(super) fn value(&self, name: &str) -> Option<&'a Plain> {
        let found = self.values.binary_search_by(|(key, _)| key.as_str().cmp(name));
        found.ok().map(|at| &self.values[at].1)
    }

    /// All names in the target, each with the name in the checkpoint.
    pub(super) fn names(&self) -> impl Iterator<Item = (&str, &str)> {
        let tensors = self.tensors.iter().map(|(here, (saved, _))| (here.as_str(), *saved));
        tensors.chain(self.values.iter().map(|(name, _)| (name.as_str(), name.as_str())))
    }
}

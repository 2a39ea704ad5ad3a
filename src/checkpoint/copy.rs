//! Copies of a checkpoint in memory of their own, which a thread writes while the training goes on.

use std::collections::BTreeMap;
use std::sync::Arc;

use torch_files::Storage as _;

use crate::checkpoint::entry::TensorEntry;
use crate::checkpoint::part::{OptimizerPart, Part, StatePart};
use crate::checkpoint::staging::Memory;
use crate::checkpoint::{Checkpoint, Parts};
use crate::error::Result;
use crate::ffi::Staged;

/// A checkpoint that is copied.
pub(super) struct Copied {
    pub(super) checkpoint: Checkpoint,
    /// The bytes of its tensors.
    pub(super) bytes: u64,
    /// The copies of CUDA devices, which may still be on their way.
    pub(super) staged: Vec<Arc<Staged>>,
}

impl Checkpoint {
    /// Copies all tensors that are in memory, into that of an earlier copy where it fits. Those of a file are read from
    /// it when the copy is written.
    pub(super) fn copied(&self, memory: &mut Memory) -> Result<Copied> {
        let (mut bytes, mut staged) = (0, Vec::new());
        let mut copy = |_: &[&str], entry: &TensorEntry| {
            let copied = entry.copied(memory)?;
            bytes += if copied.is_here() { copied.size_in_bytes() } else { 0 };
            staged.extend(copied.staged().map(Arc::clone));
            Ok(copied)
        };
        let parts = copied_parts(&self.parts, &mut copy)?;
        Ok(Copied { checkpoint: Self { parts, ..Self::default() }, bytes, staged })
    }

    /// Returns the memory of a copy for the next one.
    pub(super) fn into_memory(self) -> Memory {
        let mut memory = Memory::default();
        for part in self.parts.into_values() {
            part.into_entries(&mut |entry| entry.give_to(&mut memory));
        }
        memory
    }
}

/// Copies a tensor, whose names in its part it is given.
type Copy<'a> = dyn FnMut(&[&str], &TensorEntry) -> Result<TensorEntry> + 'a;

pub(super) fn copied_parts(parts: &Parts, copy: &mut Copy<'_>) -> Result<Parts> {
    parts.iter().map(|(name, part)| Ok((name.clone(), part.copied(copy)?))).collect()
}

type Entries = BTreeMap<String, TensorEntry>;

fn copied(entries: &Entries, copy: &mut Copy<'_>) -> Result<Entries> {
    entries.iter().map(|(name, entry)| Ok((name.clone(), copy(&[name], entry)?))).collect()
}

impl Part {
    pub(super) fn copied(&self, copy: &mut Copy<'_>) -> Result<Self> {
        Ok(match self {
            Self::Model(tensors) => Self::Model(copied(tensors, copy)?),
            Self::Optimizer(part) => Self::Optimizer(part.copied(copy)?),
            Self::Scaler(state) => Self::Scaler(state.clone()),
            Self::State(part) => Self::State(part.copied(copy)?),
            Self::Tensor(entry) => Self::Tensor(copy(&[], entry)?),
            Self::Value(value) => Self::Value(value.clone()),
            Self::Empty => Self::Empty,
            Self::Unknown(why) => Self::Unknown(why.clone()),
        })
    }

    /// Gives away all tensors.
    fn into_entries(self, take: &mut dyn FnMut(TensorEntry)) {
        match self {
            Self::Model(tensors) => tensors.into_values().for_each(take),
            Self::Optimizer(OptimizerPart { state, others, .. }) => {
                let entries = state.into_values().flat_map(BTreeMap::into_values);
                entries.for_each(|entry| take(*entry));
                others.into_values().for_each(|part| part.into_entries(take));
            }
            Self::State(StatePart { tensors, others, maybe, beside_averages, .. }) => {
                tensors.into_values().for_each(&mut *take);
                others.into_values().for_each(|part| part.into_entries(take));
                maybe.into_values().for_each(&mut *take);
                beside_averages.into_iter().flat_map(BTreeMap::into_values).for_each(take);
            }
            Self::Tensor(entry) => take(entry),
            Self::Scaler(_) | Self::Value(_) | Self::Empty | Self::Unknown(_) => {}
        }
    }
}

impl OptimizerPart {
    fn copied(&self, copy: &mut Copy<'_>) -> Result<Self> {
        let Self { state, param_groups, params_are_numbers, adam_or_adamw, by_muon, others } = self;
        let mut copied = BTreeMap::new();
        for (parameter, entries) in state {
            let entries = entries.iter().map(|(key, it)| {
                let copied = copy(&[parameter, key], it)?;
                Ok((key.clone(), Box::new(copied)))
            });
            copied.insert(parameter.clone(), entries.collect::<Result<_>>()?);
        }
        Ok(Self {
            state: copied,
            param_groups: param_groups.clone(),
            params_are_numbers: *params_are_numbers,
            adam_or_adamw: *adam_or_adamw,
            by_muon: by_muon.clone(),
            others: copied_parts(others, copy)?,
        })
    }
}

impl StatePart {
    fn copied(&self, copy: &mut Copy<'_>) -> Result<Self> {
        let Self { tensors, values, others, maybe, beside_averages } = self;
        Ok(Self {
            tensors: copied(tensors, copy)?,
            values: values.clone(),
            others: copied_parts(others, copy)?,
            maybe: copied(maybe, copy)?,
            beside_averages: beside_averages.as_ref().map(|it| copied(it, copy)).transpose()?,
        })
    }
}

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
        let checkpoint = self.mapped(&mut |_, _, entry| {
            let copied = entry.copied(memory)?;
            bytes += if copied.is_here() { copied.size_in_bytes() } else { 0 };
            staged.extend(copied.staged().map(Arc::clone));
            Ok(copied)
        })?;
        Ok(Copied { checkpoint, bytes, staged })
    }

    /// Makes a checkpoint of the same parts, with other entries for their tensors.
    pub(super) fn mapped(&self, make: &mut Make<'_>) -> Result<Self> {
        let parts =
            self.parts.iter().map(|(name, part)| Ok((name.clone(), part.mapped(name, make)?)));
        Ok(Self { parts: parts.collect::<Result<_>>()?, ..Self::default() })
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

/// Makes the entry of a tensor, given its part, its names in that, and its entry now.
pub(super) type Make<'a> = dyn FnMut(&str, &[&str], &TensorEntry) -> Result<TensorEntry> + 'a;

/// The parts within a part.
fn mapped_parts(part: &str, others: &Parts, make: &mut Make<'_>) -> Result<Parts> {
    others.iter().map(|(name, other)| Ok((name.clone(), other.mapped(part, make)?))).collect()
}

type Entries = BTreeMap<String, TensorEntry>;

fn mapped(part: &str, entries: &Entries, make: &mut Make<'_>) -> Result<Entries> {
    entries.iter().map(|(name, entry)| Ok((name.clone(), make(part, &[name], entry)?))).collect()
}

impl Part {
    fn mapped(&self, part: &str, make: &mut Make<'_>) -> Result<Self> {
        Ok(match self {
            Self::Model(tensors) => Self::Model(mapped(part, tensors, make)?),
            Self::Optimizer(it) => Self::Optimizer(it.mapped(part, make)?),
            Self::Scaler(state) => Self::Scaler(state.clone()),
            Self::State(it) => Self::State(it.mapped(part, make)?),
            Self::Tensor(entry) => Self::Tensor(make(part, &[], entry)?),
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
    fn mapped(&self, part: &str, make: &mut Make<'_>) -> Result<Self> {
        let Self { state, param_groups, params_are_numbers, adam_or_adamw, by_muon, others } = self;
        let mut mapped = BTreeMap::new();
        for (parameter, entries) in state {
            let entries = entries
                .iter()
                .map(|(key, it)| Ok((key.clone(), Box::new(make(part, &[parameter, key], it)?))));
            mapped.insert(parameter.clone(), entries.collect::<Result<_>>()?);
        }
        Ok(Self {
            state: mapped,
            param_groups: param_groups.clone(),
            params_are_numbers: *params_are_numbers,
            adam_or_adamw: *adam_or_adamw,
            by_muon: by_muon.clone(),
            others: mapped_parts(part, others, make)?,
        })
    }
}

impl StatePart {
    fn mapped(&self, part: &str, make: &mut Make<'_>) -> Result<Self> {
        let Self { tensors, values, others, maybe, beside_averages } = self;
        Ok(Self {
            tensors: mapped(part, tensors, make)?,
            values: values.clone(),
            others: mapped_parts(part, others, make)?,
            maybe: mapped(part, maybe, make)?,
            beside_averages: beside_averages
                .as_ref()
                .map(|it| mapped(part, it, make))
                .transpose()?,
        })
    }
}

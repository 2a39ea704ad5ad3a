//! Restoring models.

#![forbid(unsafe_code)]

use std::collections::{BTreeMap, HashSet};

use tch::Tensor;
use tch::nn::VarStore;

use crate::checkpoint::entry::Entry;
use crate::checkpoint::part::Part;
use crate::checkpoint::restore::names::is_batch_count;
use crate::checkpoint::restore::{Restore, Restored};
use crate::checkpoint::{CheckpointError, other_part};
use crate::error::Result;
use crate::optim::Saved;

/// A variable of a model, with what it is to become.
#[derive(Debug)]
pub(crate) struct Variable<'a> {
    tensor: Tensor,
    entry: &'a Entry,
}

impl Variable<'_> {
    pub(crate) fn copy(&self) -> Result<()> {
        self.entry.copy_to(&mut self.tensor.shallow_clone())
    }
}

impl<'a> Restore<'a> {
    /// Pairs the variables of a model with the tensors of a part.
    pub(crate) fn check_model(
        &self,
        name: &str,
        model: &VarStore,
        restored: &mut Restored,
    ) -> Result<Vec<Variable<'a>>> {
        const NONE: &BTreeMap<String, Entry> = &BTreeMap::new();
        let entries = match self.checkpoint.part(name)? {
            Part::Model(entries) => entries,
            Part::Empty => NONE,
            other => return Err(other_part(name, "a model", other)),
        };
        let mut variables: Vec<_> = model.variables().into_iter().collect();
        variables.sort_by(|(one, _), (other, _)| one.cmp(other));
        let known: HashSet<_> = variables.iter().map(|(name, _)| name.as_str()).collect();
        let saved = self.names.renamed(name, entries.keys())?;
        let (skipped, unexpected): (Vec<_>, Vec<_>) = saved
            .iter()
            .filter(|(here, _)| !known.contains(here.as_str()) && !is_batch_count(here, &known))
            .partition(|(here, _)| self.names.skips(here));
        let unexpected = unexpected.into_iter().map(|(_, name)| (*name).to_owned()).collect();
        let mut skipped: Vec<_> = skipped.into_iter().map(|(here, _)| here.clone()).collect();
        let (mut missing, mut pairs) = (Vec::new(), Vec::new());
        for (variable, tensor) in &variables {
            match saved.get(variable) {
                _ if self.names.skips(variable) => skipped.push(variable.clone()),
                Some(&saved) => pairs.push((variable, tensor, saved)),
                None if is_batch_count(variable, &known) => {}
                None => missing.push(variable.clone()),
            }
        }
        Self::judge(name, self.strict, missing, unexpected, restored)?;
        skipped.sort();
        restored.skipped_keys.extend(skipped.iter().map(|skipped| format!("{name}/{skipped}")));
        let pairs = pairs.into_iter().map(|(variable, tensor, saved)| {
            let entry = &entries[saved];
            self.check_tensor(name, (variable, saved), tensor, entry)?;
            Ok(Variable { tensor: tensor.shallow_clone(), entry })
        });
        pairs.collect()
    }

    fn check_tensor(
        &self,
        part: &str,
        (name, saved): (&str, &str),
        tensor: &Tensor,
        entry: &Entry,
    ) -> Result<()> {
        let (size, kind) = (crate::ffi::sizes(tensor)?, tensor.f_kind()?);
        let place = if name == saved {
            "in the checkpoint".to_owned()
        } else {
            format!("in the checkpoint, as `{saved}`")
        };
        let problem = if entry.size != size {
            format!(
                "has the shape {:?} {place}, and {size:?} in the model; `skip(&[\"{name}\"])` leaves it as it is",
                entry.size
            )
        } else if entry.kind != kind && !self.cast {
            format!(
                "is {:?} {place}, and {kind:?} in the model; `cast(true)` converts it",
                entry.kind
            )
        } else {
            return Ok(());
        };
        let (part, tensor) = (part.to_owned(), name.to_owned());
        Err(CheckpointError::Tensor { part, tensor, problem }.into())
    }
}

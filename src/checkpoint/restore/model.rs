//! Restoring models.

#![forbid(unsafe_code)]

use std::collections::{BTreeMap, HashSet};

use tch::Tensor;
use tch::nn::VarStore;

use crate::checkpoint::entry::Entry;
use crate::checkpoint::part::Part;
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
        let unexpected = entries.keys().filter(|name| !known.contains(name.as_str()));
        let unexpected: Vec<_> = unexpected.cloned().collect();
        let missing = variables.iter().filter(|(name, _)| !entries.contains_key(name));
        let missing = missing.map(|(name, _)| name.clone()).collect();
        Self::judge(name, self.strict, missing, unexpected, restored)?;
        let mut pairs = Vec::with_capacity(variables.len());
        for (variable, tensor) in variables {
            if let Some(entry) = entries.get(&variable) {
                self.check_tensor(name, &variable, &tensor, entry)?;
                pairs.push(Variable { tensor, entry });
            }
        }
        Ok(pairs)
    }

    fn check_tensor(&self, part: &str, name: &str, tensor: &Tensor, entry: &Entry) -> Result<()> {
        let (size, kind) = (crate::ffi::sizes(tensor)?, tensor.f_kind()?);
        let problem = if entry.size != size {
            format!(
                "has the shape {:?} in the checkpoint, and {size:?} in the model; give a new layer another name, and \
                 leave it out by `strict(false)`",
                entry.size
            )
        } else if entry.kind != kind && !self.cast {
            format!(
                "is {:?} in the checkpoint, and {kind:?} in the model; `cast(true)` converts it",
                entry.kind
            )
        } else {
            return Ok(());
        };
        let (part, tensor) = (part.to_owned(), name.to_owned());
        Err(CheckpointError::Tensor { part, tensor, problem }.into())
    }
}

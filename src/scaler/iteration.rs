//! The state of each optimizer since the last `update`.
//!
//! Unscaling opens a [`Record`] for an optimizer, the step uses it, and `update` reads the flags of all records and
//! closes them. The [`Stage`] of a record determines which calls are possible.

use std::collections::HashSet;

use tch::Tensor;

use crate::error::{Error, GradientError, Result, ScalerError};
use crate::ffi::{self, FoundInf, Gradient, Interrupted, Snapshot};
use crate::gradients::{Change, Findings, Gradients, Look, Plan, change, overflow};
use crate::scale::Number;
use crate::scaler::record::{Record, Stage};

/// Whether a step can be taken.
#[derive(Debug)]
pub(crate) enum Verdict {
    Known(bool),
    /// Skipped if this flag, on a device, is not zero.
    Unless(Tensor),
}

/// The optimizer to which a list of parameters belongs.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    None,
    Record(usize),
    /// The gradient of the parameter at this index has been unscaled for another optimizer.
    Shared(usize),
}

/// The optimizers of one iteration.
#[derive(Debug, Default)]
pub(crate) struct Iteration {
    records: Vec<Record>,
    /// A loss was scaled.
    is_scaled: bool,
}

impl Iteration {
    pub(crate) fn is_open(&self) -> bool {
        !self.records.is_empty()
    }

    pub(crate) fn stage(&self, record: usize) -> Stage {
        self.records[record].stage
    }

    pub(crate) fn set_stage(&mut self, record: usize, stage: Stage) {
        self.records[record].stage = stage;
    }

    /// Records that unscaling may have stopped midway.
    pub(crate) fn set_broken(&mut self, record: usize) {
        self.records[record].set_broken();
    }

    /// Finds the optimizer to which these parameters belong. One that has gained parameters is still the same as long
    /// as the new ones have no gradients, which would not have been unscaled.
    pub(crate) fn owner(&self, gradients: &[Gradient]) -> Owner {
        let gained_none = |record: &usize| {
            let known = self.records[*record].snapshot.len();
            gradients[known..].iter().all(|gradient| !gradient.exists())
        };
        if self.records.is_empty() {
            return Owner::None;
        }
        if let Some(record) = self.find(gradients).filter(gained_none) {
            return Owner::Record(record);
        }
        // The snapshots hold the gradients, so that no other has their identity.
        let known = self.records.iter().flat_map(|record| record.snapshot.iter());
        let known = known.filter(|known| known.exists());
        let known: HashSet<_> = known.map(|known| (known.parameter(), known.identity())).collect();
        let shared = |gradient: &Gradient| {
            gradient.exists() && known.contains(&(gradient.parameter(), gradient.identity()))
        };
        gradients.iter().position(shared).map_or(Owner::None, Owner::Shared)
    }

    /// Finds the record whose parameters these begin with.
    pub(crate) fn find(&self, gradients: &[Gradient]) -> Option<usize> {
        self.records.iter().position(|record| {
            let known = &record.snapshot;
            let pairs = || known.iter().zip(gradients);
            known.len() <= gradients.len() && pairs().all(|(a, b)| a.parameter() == b.parameter())
        })
    }

    /// Unscales or checks the gradients that `plan` lists and opens a record; `None` if there are none, unless
    /// `even_empty`.
    pub(crate) fn open(
        &mut self,
        gradients: Gradients<'_>,
        plan: &Plan,
        scale: &Number,
        look: Look,
        even_empty: bool,
    ) -> Result<Option<usize>> {
        plan.drop_frozen(gradients.parameters())?;
        if plan.groups.is_empty() && !even_empty {
            return Ok(None);
        }
        let index = self.records.len();
        self.records.push(Record::new(gradients));
        match look {
            Look::Unscale => self.unscale(index, plan, scale)?,
            Look::Check | Look::Norm => self.look(index, plan, scale, look == Look::Norm)?,
        }
        Ok(Some(index))
    }

    /// Unscales the gradients of a new record. A failure before the first change removes the record; one midway leaves
    /// it broken.
    fn unscale(&mut self, index: usize, plan: &Plan, scale: &Number) -> Result<()> {
        let record = &mut self.records[index];
        let unscaling = scale.unscaling();
        match plan.unscale(&record.parameters, scale.tensor(), unscaling) {
            Ok(found) => {
                if !unscaling.check_only {
                    record.snapshot = Snapshot::of(&record.parameters)?;
                }
                (record.stage, record.found) = (Stage::Unscaled, found);
                Ok(())
            }
            Err(Interrupted { error, begun }) => {
                if begun {
                    record.set_broken();
                } else {
                    self.abandon(index);
                }
                Err(error)
            }
        }
    }

    /// Checks the gradients of a new record without changing them. A failure removes the record.
    fn look(&mut self, index: usize, plan: &Plan, scale: &Number, with_norm: bool) -> Result<()> {
        let record = &mut self.records[index];
        let (parameters, number) = (&record.parameters, scale.tensor());
        let looked = match with_norm {
            true => plan.norm(parameters, number),
            false => plan.check(parameters, number, scale.may_enlarge()),
        };
        match looked {
            Ok(Findings { found, norm }) => {
                (record.stage, record.found, record.norm) = (Stage::Looked, found, norm);
                Ok(())
            }
            Err(error) => {
                self.abandon(index);
                Err(error)
            }
        }
    }

    /// The parameters whose gradients have been unscaled, by identity. Fails if one of `parameters` belongs to an
    /// optimizer that has been stepped, so that its gradients may or may not be scaled.
    #[cfg(feature = "insight")]
    pub(crate) fn unscaled(&self, parameters: &[Gradient]) -> Result<HashSet<usize>> {
        let wanted: HashSet<_> = parameters.iter().map(Gradient::parameter).collect();
        let mut unscaled = HashSet::new();
        for record in &self.records {
            let known = record.snapshot.iter().filter(|known| known.exists());
            let mut known = known.map(Gradient::parameter).filter(|known| wanted.contains(known));
            match record.stage {
                Stage::Unscaled => unscaled.extend(known),
                Stage::Broken if known.next().is_some() => {
                    return Err(Error::Scaler(ScalerError::UnscaleFailed));
                }
                Stage::Looked | Stage::Stepped if known.next().is_some() => {
                    return Err(Error::Scaler(ScalerError::AlreadyStepped));
                }
                Stage::Broken | Stage::Looked | Stage::Stepped => {}
            }
        }
        Ok(unscaled)
    }

    /// Records that a loss is being scaled: from here on, a change of an unscaled gradient may come from its backward.
    /// If it is not the first, that backward may add to gradients, each of which has to have memory of its own.
    pub(crate) fn note_scale(&mut self, loss: &Tensor) -> Result<()> {
        if std::mem::replace(&mut self.is_scaled, true) {
            ffi::gradients_separate_leaves(loss)?;
        }
        for record in self.records.iter_mut().filter(|record| record.stage == Stage::Unscaled) {
            let now = Snapshot::of(&record.parameters)?;
            record.accept(now);
            record.rescaled = true;
        }
        Ok(())
    }

    /// Compares the gradients with those that were unscaled, and marks the record for another check if values changed.
    pub(crate) fn compare(&mut self, record: usize, gradients: &Gradients<'_>) -> Result<()> {
        let compared = self.records[record].compare(gradients.snapshot());
        compared.map_err(|(index, how)| {
            let parameter = gradients.describe(index);
            Error::Gradient(GradientError::Changed { parameter, how })
        })
    }

    /// Accepts the gradients after a change by this crate. They are checked again only if the change can have made one
    /// non-finite.
    pub(crate) fn accept(&mut self, record: usize, now: Snapshot, look_again: bool) {
        let record = &mut self.records[record];
        record.snapshot = now;
        record.dirty |= look_again;
    }

    /// The norm of the unscaled gradients, where it was taken.
    pub(crate) fn norm(&self, record: usize) -> Option<Tensor> {
        self.records[record].norm.as_ref().map(Tensor::shallow_clone)
    }

    /// Whether a failed step left the gradients as they were.
    pub(crate) fn is_untouched(&self, record: usize) -> bool {
        self.records[record].is_untouched()
    }

    /// Returns whether there are broken records; fails while the gradients of one are still those that were left half
    /// unscaled.
    pub(crate) fn check_broken(&self) -> Result<bool> {
        let mut any = false;
        for record in self.records.iter().filter(|record| record.stage == Stage::Broken) {
            let now = ffi::gradients_inspect(&record.parameters)?;
            let kept = |(known, now): (&Gradient, &Gradient)| {
                now.exists() && change(Some(known), now) == Change::None
            };
            if record.snapshot.iter().zip(&now).any(kept) {
                return Err(Error::Scaler(ScalerError::UnscaleFailed));
            }
            any = true;
        }
        Ok(any)
    }

    /// Whether the record allows a step. Does not synchronize: the verdict is a flag on a device if the host has not
    /// read the answer.
    pub(crate) fn verdict(&self, record: usize) -> Result<Verdict> {
        let record = &self.records[record];
        if let Some(found) = overflow(&record.found) {
            return Ok(Verdict::Known(!found));
        }
        Ok(Verdict::Unless(ffi::flags_join(record.found.iter().map(|flag| &flag.tensor))?))
    }

    /// Compares like [`compare`](Self::compare), and checks gradients whose values changed.
    pub(crate) fn verify(
        &mut self,
        record: usize,
        gradients: Gradients<'_>,
        scale: &Tensor,
    ) -> Result<()> {
        self.compare(record, &gradients)?;
        let record = &mut self.records[record];
        if !record.dirty {
            return Ok(());
        }
        let plan = Plan::new(&gradients, true)?;
        let findings = plan.check(gradients.parameters(), scale, false)?;
        record.found.extend(findings.found);
        record.snapshot = gradients.into_snapshot();
        record.dirty = false;
        Ok(())
    }

    /// Whether a gradient of the record was non-finite. Synchronizes, once, if only devices have the answer.
    pub(crate) fn found_inf(&mut self, record: usize) -> Result<bool> {
        self.records[record].found_inf()
    }

    /// The flags of all records.
    pub(crate) fn found(&self) -> impl Iterator<Item = &FoundInf> {
        self.records.iter().flat_map(|record| &record.found)
    }

    /// Whether there is a flag for the gradients of a record.
    pub(crate) fn has_found(&self, record: usize) -> bool {
        !self.records[record].found.is_empty()
    }

    /// Makes the step of a record depend on another flag, too.
    pub(crate) fn add_found(&mut self, record: usize, found: FoundInf) {
        self.records[record].found.push(found);
    }

    /// Forgets a record. Its gradients stay unscaled.
    pub(crate) fn abandon(&mut self, record: usize) {
        self.records.remove(record);
    }

    /// Ends the iteration.
    pub(crate) fn close(&mut self) {
        self.records.clear();
        self.is_scaled = false;
    }
}

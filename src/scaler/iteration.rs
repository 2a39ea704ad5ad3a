//! The state of each optimizer since the last `update`.

use tch::Tensor;

use crate::error::{Error, GradientError, Result, ScalerError};
use crate::ffi::{self, FoundInf, Gradient, Interrupted, Snapshot};
use crate::gradients::{Change, Findings, Gradients, IdentityMap, Look, Plan, change, overflow};
use crate::scale::Number;

/// How far an optimizer is in this iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// libtorch failed midway: some gradients may be unscaled and some not.
    Broken,
    /// The gradients were checked and are still scaled: a step is in progress.
    Looked,
    Unscaled,
    Stepped,
}

/// Whether a step can be taken.
#[derive(Debug)]
pub(crate) enum Verdict {
    Known(bool),
    /// Skipped if this flag, on a device, is not zero.
    Unless(Tensor),
}

/// An optimizer, recognised by its parameters.
#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) stage: Stage,
    /// The gradients as unscaling left them, in the order of the parameters.
    snapshot: Snapshot,
    /// The parameters, kept alive so that their identities stay theirs until the iteration ends.
    parameters: Vec<Tensor>,
    found: Vec<FoundInf>,
    /// Values changed since unscaling, so they have to be checked again.
    dirty: bool,
    /// A loss was scaled since unscaling, so a change may come from its backward.
    rescaled: bool,
    /// The norm of the unscaled gradients, where it was taken.
    norm: Option<Tensor>,
}

/// The optimizer to which a list of parameters belongs.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    Nobody,
    Record(usize),
    /// The gradient of the parameter at this index has been unscaled for another optimizer.
    Shared(usize),
}

/// The optimizers of one iteration.
#[derive(Debug, Default)]
pub(crate) struct Iteration {
    records: Vec<Record>,
    /// The parameters of all records.
    known: IdentityMap<()>,
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
        if let Some(record) = self.find(gradients).filter(gained_none) {
            return Owner::Record(record);
        }
        let shared = |gradient: &Gradient| {
            self.known.contains_key(&gradient.parameter())
                && self.records.iter().any(|record| record.has(gradient))
        };
        gradients.iter().position(shared).map_or(Owner::Nobody, Owner::Shared)
    }

    /// Finds the record whose parameters these begin with.
    pub(crate) fn find(&self, gradients: &[Gradient]) -> Option<usize> {
        self.records.iter().position(|record| {
            let known = &record.snapshot;
            let pairs = || known.iter().zip(gradients);
            known.len() <= gradients.len() && pairs().all(|(a, b)| a.parameter() == b.parameter())
        })
    }

    /// Unscales or checks the gradients that `plan` lists and opens a record; `None` if there are none.
    pub(crate) fn open(
        &mut self,
        gradients: Gradients<'_>,
        plan: &Plan,
        scale: &Number,
        look: Look,
    ) -> Result<Option<usize>> {
        plan.drop_frozen(gradients.parameters())?;
        if plan.groups.is_empty() {
            return Ok(None);
        }
        let index = self.records.len();
        self.records.push(Record::new(gradients));
        match look {
            Look::Unscale => self.unscale(index, plan, scale)?,
            Look::Check | Look::Norm => self.look(index, plan, scale, look == Look::Norm)?,
        }
        self.known.extend(self.records[index].snapshot.iter().map(|known| (known.parameter(), ())));
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
        let look = if with_norm { Plan::norm } else { Plan::check };
        match look(plan, &record.parameters, scale.tensor()) {
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

    /// Records that a loss is being scaled: from here on, a change of an unscaled gradient may come from its backward.
    pub(crate) fn note_scale(&mut self) -> Result<()> {
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

    /// Whether a failed step left the gradients as they were. On the CPU it never changes them.
    pub(crate) fn is_untouched(&self, record: usize) -> bool {
        let record = &self.records[record];
        if overflow(&record.found).is_some() {
            return true;
        }
        let same = |(known, now): (_, &Gradient)| change(Some(known), now) == Change::None;
        match ffi::gradients_inspect(&record.parameters) {
            Ok(now) => record.snapshot.iter().zip(&now).all(same),
            Err(_) => false,
        }
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
        let findings = plan.check(gradients.parameters(), scale)?;
        record.found.extend(findings.found);
        record.snapshot = gradients.into_snapshot();
        record.dirty = false;
        Ok(())
    }

    /// Whether a gradient of the record was non-finite. Synchronizes, once, if only devices have the answer.
    pub(crate) fn found_inf(&mut self, record: usize) -> Result<bool> {
        let record = &mut self.records[record];
        let host = overflow(&record.found);
        let found = match host {
            Some(found) => found,
            None => {
                let flags: Vec<_> = record.found.iter().map(|flag| &flag.tensor).collect();
                ffi::any_nonzero(&flags)?
            }
        };
        if host.is_none() {
            for flag in &mut record.found {
                // Only the sum of the flags matters, and it is known now.
                flag.host = Some(found);
            }
        }
        Ok(found)
    }

    /// The flags of all records.
    pub(crate) fn found(&self) -> impl Iterator<Item = &FoundInf> {
        self.records.iter().flat_map(|record| &record.found)
    }

    /// Makes the step of a record depend on another flag, too.
    pub(crate) fn add_found(&mut self, record: usize, found: FoundInf) {
        self.records[record].found.push(found);
    }

    /// Forgets a record. Its gradients stay unscaled.
    pub(crate) fn abandon(&mut self, record: usize) {
        self.records.remove(record);
        let left = self.records.iter().flat_map(|record| record.snapshot.iter());
        self.known = left.map(|known| (known.parameter(), ())).collect();
    }

    /// Ends the iteration.
    pub(crate) fn close(&mut self) {
        self.records.clear();
        self.known.clear();
    }
}

impl Record {
    /// A record of gradients that have not been checked yet.
    fn new(gradients: Gradients<'_>) -> Self {
        let (parameters, snapshot) = gradients.into_parts();
        Self {
            stage: Stage::Broken,
            snapshot,
            parameters,
            found: Vec::new(),
            dirty: false,
            rescaled: false,
            norm: None,
        }
    }

    fn set_broken(&mut self) {
        self.stage = Stage::Broken;
        // `update` compares with this to see whether they were zeroed.
        if let Ok(now) = Snapshot::of(&self.parameters) {
            self.snapshot = now;
        }
    }

    /// Whether this is one of the record's gradients. The snapshot holds them, so that no other has their identity.
    fn has(&self, gradient: &Gradient) -> bool {
        let same = |known: &Gradient| {
            known.parameter() == gradient.parameter() && known.identity() == gradient.identity()
        };
        gradient.exists() && self.snapshot.iter().any(same)
    }

    /// Marks the record if values changed; fails at the first gradient that is not the one that was unscaled.
    fn compare(&mut self, now: &[Gradient]) -> std::result::Result<(), (usize, &'static str)> {
        for (index, gradient) in now.iter().enumerate() {
            match change(self.snapshot.get(index), gradient) {
                Change::None => {}
                Change::Numbers if self.rescaled => {
                    return Err((index, "changed after another loss was scaled"));
                }
                Change::Numbers => self.dirty = true,
                Change::Replaced(how) => return Err((index, how)),
            }
        }
        Ok(())
    }

    /// Accepts new values, but neither replaced nor new gradients: the step refuses those.
    fn accept(&mut self, mut now: Snapshot) {
        for index in 0..self.snapshot.len().min(now.len()) {
            let numbers = change(self.snapshot.get(index), &now[index]) == Change::Numbers;
            self.dirty |= numbers;
            if numbers || !now[index].exists() {
                self.snapshot.exchange(&mut now, index);
            }
        }
    }
}

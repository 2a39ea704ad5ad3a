//! The state of each optimizer since the last `update`.
//!
//! Unscaling opens a [`Record`] for an optimizer, the step uses it, and `update` reads the flags of all records and
//! closes them. The [`Stage`] of a record determines which calls are possible.
//!
//! An optimizer is recognized by the identities of its parameters, not by its address, so it may be moved between the
//! calls of an iteration. A record belongs to its parameters and to the gradients that these had, by which the step
//! notices that one was replaced or changed, and optimizers with the same parameters are told apart. Gradients that a
//! backward has made since a step are new, so the same parameters, in whichever optimizers, can have several records
//! until `update`.

use std::collections::HashMap;
#[cfg(feature = "insight")]
use std::collections::HashSet;
use std::ops::{Index, IndexMut};

use tch::Tensor;

use crate::error::{Error, GradientError, Result, ScalerError};
use crate::ffi::{self, FoundInf, Gradient, Interrupted, Snapshot};
use crate::gradients::{Gradients, Plan, drop_frozen};
use crate::scale::ScaleTensor;
use crate::scaler::carried::{Carried, Ending};
use crate::scaler::record::{Record, Stage, StepStart};

/// A record of the present iteration, which the removal of others does not change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordId(usize);

/// The record to which the gradients of a list of parameters belong.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// To none: a backward has made them since the last step of these parameters, if there are any.
    None,
    Record(RecordId),
    /// The gradient of the parameter at this index has been unscaled for another optimizer.
    Shared(usize),
}

/// The identity of a gradient: its parameter and itself.
type Key = (usize, (usize, usize));

fn key(gradient: &Gradient) -> Option<Key> {
    gradient.exists().then(|| (gradient.parameter(), gradient.identity()))
}

/// The optimizers of one iteration.
#[derive(Debug, Default)]
pub(crate) struct Iteration {
    records: Vec<Record>,
    /// A loss was scaled.
    is_scaled: bool,
    /// The gradients that no step has used yet.
    carried: Carried,
}

impl Iteration {
    pub(crate) fn is_open(&self) -> bool {
        self.live().next().is_some()
    }

    /// Returns whether a loss was scaled since the last `update`.
    #[cfg(feature = "insight")]
    pub(crate) fn is_scaled(&self) -> bool {
        self.is_scaled
    }

    /// Fails if an optimizer has been unscaled, at least in part, and not stepped. A call that ends the iteration would
    /// forget that its gradients are unscaled.
    pub(crate) fn refuse_due(&self, call: &'static str) -> Result<()> {
        for (_, record) in self.live() {
            match record.stage {
                Stage::Broken => return Err(Error::Scaler(ScalerError::UnscaleFailed)),
                Stage::Checked | Stage::Unscaled => {
                    return Err(Error::Scaler(ScalerError::StepDue { call }));
                }
                Stage::Stepped | Stage::Removed => {}
            }
        }
        Ok(())
    }

    /// The records that have not been removed.
    fn live(&self) -> impl Iterator<Item = (RecordId, &Record)> {
        let records = self.records.iter().enumerate();
        let records = records.map(|(index, record)| (RecordId(index), record));
        records.filter(|(_, record)| record.stage != Stage::Removed)
    }

    /// Records that the step of a record was taken or skipped.
    pub(crate) fn set_stepped(&mut self, record: RecordId) {
        self[record].set_stepped();
        let Self { carried, records, .. } = self;
        carried.use_up(&records[record.0].snapshot);
    }

    /// Removes a record whose step is not taken, and keeps in mind which gradients are unscaled.
    pub(crate) fn abandon(&mut self, record: RecordId, scale: Option<&ScaleTensor>) -> Result<()> {
        let Self { carried, records, .. } = self;
        let record = &mut records[record.0];
        if let (Some(scale), Stage::Unscaled) = (scale, record.stage) {
            carried.note_unscaled(record, scale)?;
            carried.search_on();
        }
        record.remove();
        Ok(())
    }

    /// Forgets a record whose gradients have not been changed, apart from their dtypes, which they get back.
    pub(super) fn withdraw(&mut self, record: RecordId) {
        let Self { carried, records, .. } = self;
        let record = &mut records[record.0];
        let before = record.snapshot.to_vec();
        record.undo_widening();
        // Without memory, they count as gradients of the present scale.
        let _followed = carried.follow(&before, &record.parameters);
        record.remove();
    }

    /// Finds the record to which these gradients belong. An optimizer that has gained parameters is still the same as
    /// long as the new ones have no gradients, which would not have been unscaled. Synchronizes only where gradients on
    /// a GPU were zeroed in place after a step, to learn that nothing is left of them.
    pub(crate) fn owner(&self, gradients: &[Gradient]) -> Result<Owner> {
        let gained_none = |record: &RecordId| {
            let known = self[*record].snapshot.len();
            gradients[known..].iter().all(|gradient| !gradient.exists())
        };
        let own = self.find(gradients).filter(gained_none);
        match own {
            Some(record) if self[record].stage != Stage::Stepped => Ok(Owner::Record(record)),
            _ => Ok(match (self.first_known(gradients)?, own) {
                (None, _) => Owner::None,
                (Some(_), Some(record)) => Owner::Record(record),
                (Some(index), None) => Owner::Shared(index),
            }),
        }
    }

    /// Finds the record whose parameters these begin with: the longest if there are several, and then the latest.
    pub(crate) fn find(&self, gradients: &[Gradient]) -> Option<RecordId> {
        let begins_with = |known: &[Gradient]| {
            let mut pairs = known.iter().zip(gradients);
            known.len() <= gradients.len() && pairs.all(|(a, b)| a.parameter() == b.parameter())
        };
        let records = self.live().filter(|(_, record)| begins_with(&record.snapshot));
        records.max_by_key(|(_, record)| record.snapshot.len()).map(|(id, _)| id)
    }

    /// The index of the first gradient that a record has, and of which something is left.
    fn first_known(&self, gradients: &[Gradient]) -> Result<Option<usize>> {
        if !self.is_open() {
            return Ok(None);
        }
        let held = self.held();
        let known = gradients.iter().enumerate();
        let known =
            known.filter_map(|(index, gradient)| Some((index, *held.get(&key(gradient)?)?)));
        let known: Vec<_> = known.collect();
        if known.is_empty() {
            return Ok(None);
        }
        let rests: Vec<_> = known.iter().filter_map(|(_, (record, at))| record.rest(*at)).collect();
        if rests.len() == known.len() && !ffi::any_nonzero(&rests)? {
            return Ok(None);
        }
        for (index, (record, at)) in known {
            if record.is_leftover(at)? {
                return Ok(Some(index));
            }
        }
        Ok(None)
    }

    /// The gradients that the records have, each with its latest record and its index there. The snapshots hold the
    /// gradients, so that no other has their identity.
    fn held(&self) -> HashMap<Key, (&Record, usize)> {
        let mut held = HashMap::new();
        for (_, record) in self.live() {
            for (index, gradient) in record.snapshot.iter().enumerate() {
                held.extend(key(gradient).map(|key| (key, (record, index))));
            }
        }
        held
    }

    /// Finds the record of these gradients, whose step is due, or opens one, which unscales or checks them; unscaling
    /// again fails. `None` if there are no gradients, unless `even_empty`. Gradients that were widened for this have
    /// their dtypes back if it fails before the first change.
    pub(crate) fn begin(
        &mut self,
        gradients: Gradients<'_>,
        start: &StepStart<'_>,
    ) -> Result<Option<RecordId>> {
        match self.owner(gradients.snapshot())? {
            Owner::None => self.open(gradients, start),
            Owner::Record(id) => {
                let record = &mut self[id];
                if start.of_step {
                    record.stage.check_due()?;
                    record.verify(gradients, start.scale.tensor())?;
                    return Ok(Some(id));
                }
                Err(record.stage.refuse_unscale())
            }
            Owner::Shared(index) => {
                Err(Error::Gradient(GradientError::Shared { parameter: gradients.describe(index) }))
            }
        }
    }

    /// Opens a record of gradients that no record has.
    fn open(
        &mut self,
        gradients: Gradients<'_>,
        start: &StepStart<'_>,
    ) -> Result<Option<RecordId>> {
        let plan = start.plan(&gradients)?;
        let mut gradients = self.convert(gradients, &plan, start.scale)?;
        let follows = start.widens && !self.carried.is_empty();
        let before = follows.then(|| gradients.snapshot().to_vec());
        let prepared = start.prepare(&mut gradients, plan);
        if let Some(before) = before {
            // Without memory, they count as gradients of the present scale.
            let _followed = self.carried.follow(&before, gradients.parameters());
        }
        let (plan, widened) = prepared?;
        if plan.groups.is_empty() && !start.even_empty {
            gradients.drop_frozen()?;
            return Ok(None);
        }
        let id = RecordId(self.records.len());
        self.records.push(Record::new(gradients, widened));
        if let Err(Interrupted { error, begun }) = self[id].begin(&plan, start) {
            match begun {
                true => self[id].set_broken(),
                false => self.withdraw(id),
            }
            return Err(error);
        }
        let Self { carried, records, .. } = self;
        let record = &mut records[id.0];
        if record.stage == Stage::Unscaled {
            carried.use_up(&record.snapshot);
        }
        drop_frozen(&record.parameters, &record.snapshot)?;
        Ok(Some(id))
    }

    /// The parameters whose gradients have been unscaled, by identity. Fails if one of the gradients was used by a
    /// step, so that it may or may not be scaled.
    #[cfg(feature = "insight")]
    pub(crate) fn unscaled(&self, gradients: &[Gradient]) -> Result<HashSet<usize>> {
        let held = self.held();
        let mut unscaled: HashSet<_> = self.carried.left_unscaled(gradients).collect();
        for gradient in gradients {
            let Some((record, index)) = key(gradient).and_then(|key| held.get(&key)) else {
                continue;
            };
            match record.stage {
                Stage::Unscaled => drop(unscaled.insert(gradient.parameter())),
                Stage::Broken => return Err(Error::Scaler(ScalerError::UnscaleFailed)),
                Stage::Checked | Stage::Stepped if record.is_leftover(*index)? => {
                    return Err(Error::Scaler(ScalerError::AlreadyStepped));
                }
                Stage::Checked | Stage::Stepped | Stage::Removed => {}
            }
        }
        Ok(unscaled)
    }

    /// Gives the gradients of an optimizer the present scale, where they have an earlier one, of those that `plan`
    /// lists. Fails before any change if one is a sum of gradients of two scales; a failure midway leaves a broken
    /// record.
    pub(crate) fn convert<'a>(
        &mut self,
        mut gradients: Gradients<'a>,
        plan: &Plan,
        present: &ScaleTensor,
    ) -> Result<Gradients<'a>> {
        let earlier = self.carried.earlier(&gradients, plan, present)?;
        if earlier.is_empty() {
            return Ok(gradients);
        }
        let converted = self.carried.convert(gradients.parameters(), earlier, present);
        if let Err(Interrupted { error, begun }) = converted {
            if begun {
                let mut record = Record::new(gradients, None);
                record.set_broken();
                self.records.push(record);
            }
            return Err(error);
        }
        gradients.inspect_again()?;
        Ok(gradients)
    }

    /// Records that the backward of the loss that was just scaled is complete.
    pub(crate) fn note_backward(&mut self) {
        self.carried.note_backward();
    }

    /// Records that losses are being scaled: from here on, a change of a gradient may come from their backward. That of
    /// any but the first may add to gradients, each of which has to have memory of its own. `scale` is the scale, if
    /// any.
    pub(crate) fn note_scale(
        &mut self,
        losses: &[&Tensor],
        scale: Option<&ScaleTensor>,
    ) -> Result<()> {
        for loss in losses {
            if std::mem::replace(&mut self.is_scaled, true) {
                ffi::gradients_separate_leaves(loss)?;
            }
        }
        self.record_leftovers()?;
        let Self { carried, records, .. } = self;
        for record in records.iter_mut().filter(|record| record.stage == Stage::Unscaled) {
            let now = Snapshot::of(&record.parameters)?;
            let rescaled = record.rescaled;
            record.accept(now, |parameter| rescaled && carried.may_be_sum(parameter));
            if let Some(scale) = scale {
                carried.note_unscaled(record, scale)?;
            }
            record.rescaled = true;
        }
        scale.map_or(Ok(()), |scale| self.carried.note(losses, scale))
    }

    /// Notes what is left of the gradients that were changed in place since a step. Nothing is left of those that were
    /// zeroed, so what a backward adds to them is new.
    pub(crate) fn record_leftovers(&mut self) -> Result<()> {
        let stepped = |record: &&mut Record| record.stage == Stage::Stepped;
        self.records.iter_mut().filter(stepped).try_for_each(Record::record_leftovers)
    }

    /// Returns whether there are broken records; fails while the gradients of one are still those that were left half
    /// unscaled.
    pub(crate) fn check_broken(&self) -> Result<bool> {
        let mut any = false;
        for record in self.records.iter().filter(|record| record.stage == Stage::Broken) {
            record.check_zeroed()?;
            any = true;
        }
        Ok(any)
    }

    /// The flags of all records.
    pub(crate) fn found(&self) -> impl Iterator<Item = &FoundInf> {
        self.records.iter().flat_map(|record| &record.found)
    }

    /// Returns the changes of the gradients that no step has used, at the end of the iteration. Nothing has changed
    /// yet.
    pub(super) fn ending(&self, present: &ScaleTensor, changes: bool) -> Result<Ending> {
        self.carried.ending(&self.records, present, changes)
    }

    /// The gradients that no step has used.
    pub(super) fn carried(&mut self) -> &mut Carried {
        &mut self.carried
    }

    /// Ends the iteration.
    pub(crate) fn close(&mut self) {
        self.records.clear();
        self.is_scaled = false;
    }
}

impl Index<RecordId> for Iteration {
    type Output = Record;

    fn index(&self, RecordId(index): RecordId) -> &Record {
        &self.records[index]
    }
}

impl IndexMut<RecordId> for Iteration {
    fn index_mut(&mut self, RecordId(index): RecordId) -> &mut Record {
        &mut self.records[index]
    }
}

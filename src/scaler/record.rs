//! The knowledge of one optimizer since the last `update`.

use std::collections::HashMap;

use tch::Tensor;

use crate::error::{Error, GradientChange, GradientError, Result, ScalerError};
use crate::ffi::{self, FoundInf, Gradient, Interrupted, Snapshot, Widened};
use crate::gradients::{
    Change, Findings, Gradients, Plan, Preparation, change, overflow, unclippable,
};
use crate::scale::ScaleTensor;

/// How far an optimizer is in this iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// libtorch failed midway: some gradients may be unscaled and some not.
    Broken,
    /// The gradients were checked and are still scaled: a step is in progress.
    Checked,
    Unscaled,
    Stepped,
    /// The record was withdrawn or abandoned, and is no more than a number.
    Removed,
}

impl Stage {
    /// Fails unless a step is the next call that is due.
    pub(super) fn check_due(self) -> Result<()> {
        match self {
            Self::Broken => Err(Error::Scaler(ScalerError::UnscaleFailed)),
            Self::Checked | Self::Stepped | Self::Removed => {
                Err(Error::Scaler(ScalerError::AlreadyStepped))
            }
            Self::Unscaled => Ok(()),
        }
    }

    /// The error of unscaling again.
    pub(super) fn refuse_unscale(self) -> Error {
        Error::Scaler(match self {
            Self::Broken => ScalerError::UnscaleFailed,
            Self::Unscaled => ScalerError::AlreadyUnscaled,
            Self::Checked | Self::Stepped | Self::Removed => ScalerError::UnscaleAfterStep,
        })
    }
}

/// The start of `unscale_` or of a step.
#[derive(Debug)]
pub(super) struct StepStart<'a> {
    pub(super) scale: &'a ScaleTensor,
    pub(super) preparation: Preparation,
    /// Whether the call is a step, which may have been unscaled before.
    pub(super) of_step: bool,
    /// Whether gradients become f32 first: the optimizer updates in f32, and they are unscaled in place or their
    /// unscaled norm is taken.
    pub(super) widens: bool,
    /// Whether gradients may be fp16.
    pub(super) allows_fp16: bool,
    /// Whether there is a record even of an optimizer without gradients: its ranks agree on what they have found.
    pub(super) even_empty: bool,
}

impl StepStart<'_> {
    /// Checks gradients, which are unscaled in another dtype than theirs if they are widened.
    pub(super) fn plan(&self, gradients: &Gradients<'_>) -> Result<Plan> {
        let plan = Plan::new(gradients, self.widens || self.allows_fp16)?;
        if matches!(self.preparation, Preparation::Norm(_)) {
            gradients.refuse(Gradient::is_used, unclippable)?;
        }
        Ok(plan)
    }

    /// Gives checked gradients memory of their own and, if wanted, the dtype that they are unscaled in. If it fails,
    /// they have the dtypes from before.
    pub(super) fn prepare(
        &self,
        gradients: &mut Gradients<'_>,
        plan: Plan,
    ) -> Result<(Plan, Option<Widened>)> {
        if !self.widens {
            gradients.separate()?;
            return Ok((plan, None));
        }
        let widened = ffi::gradients_widen(gradients.parameters())?;
        let mut planned = || {
            if widened.any() {
                gradients.inspect_again()?;
            }
            let plan = Plan::new(gradients, self.allows_fp16)?;
            gradients.separate()?;
            Ok(plan)
        };
        match planned() {
            Ok(plan) => Ok((plan, Some(widened))),
            Err(error) => {
                let _failed = widened.undo(gradients.parameters());
                Err(error)
            }
        }
    }
}

/// The check whether a step can be taken.
#[derive(Debug)]
pub(super) enum OverflowCheck {
    /// The host knows whether it is taken.
    Known(bool),
    /// It is skipped if this flag, on a device, is not zero.
    Unless(Tensor),
}

/// An optimizer, recognised by its parameters.
#[derive(Debug)]
pub(crate) struct Record {
    pub(super) stage: Stage,
    /// The gradients as unscaling left them, in the order of the parameters.
    pub(super) snapshot: Snapshot,
    /// The parameters, kept alive so that no other tensor gets the identity of one until the iteration ends.
    pub(super) parameters: Vec<Tensor>,
    pub(super) found: Vec<FoundInf>,
    /// Values changed since unscaling, so they have to be checked again.
    pub(super) dirty: bool,
    /// A loss was scaled since unscaling, so a change may come from its backward.
    pub(super) rescaled: bool,
    /// The norm of the unscaled gradients, where it was taken.
    pub(super) norm: Option<Tensor>,
    /// For each gradient that was changed in place after the step, a flag on its device: zero if nothing was left of it
    /// when a loss was scaled.
    rests: HashMap<usize, Tensor>,
    /// The change of dtype of half-precision gradients before they were unscaled or their norm was taken.
    widened: Option<Widened>,
}

impl Record {
    /// A record of gradients that have not been checked yet.
    pub(super) fn new(gradients: Gradients<'_>, widened: Option<Widened>) -> Self {
        let (parameters, snapshot) = gradients.into_parts();
        Self {
            stage: Stage::Broken,
            snapshot,
            parameters,
            found: Vec::new(),
            dirty: false,
            rescaled: false,
            norm: None,
            rests: HashMap::new(),
            widened,
        }
    }

    /// Unscales or checks the gradients of a new record.
    pub(super) fn begin(
        &mut self,
        plan: &Plan,
        start: &StepStart<'_>,
    ) -> std::result::Result<(), Interrupted> {
        let whole = |error| Interrupted { error, begun: false };
        match start.preparation {
            Preparation::Unscale => self.unscale(plan, start.scale),
            Preparation::Check => self.check(plan, start.scale, None).map_err(whole),
            Preparation::Norm(norm_type) => {
                self.check(plan, start.scale, Some(norm_type)).map_err(whole)
            }
        }
    }

    fn unscale(
        &mut self,
        plan: &Plan,
        scale: &ScaleTensor,
    ) -> std::result::Result<(), Interrupted> {
        let unscaling = scale.unscaling();
        let found = plan.unscale(&self.parameters, scale.tensor(), unscaling)?;
        // Without the new versions, the gradients only count as changed.
        if !unscaling.check_only
            && let Ok(now) = Snapshot::of(&self.parameters)
        {
            self.snapshot = now;
        }
        (self.stage, self.found) = (Stage::Unscaled, found);
        Ok(())
    }

    /// Checks the gradients without changing them, and takes a norm if its type is given.
    fn check(&mut self, plan: &Plan, scale: &ScaleTensor, norm_type: Option<f64>) -> Result<()> {
        let (parameters, number) = (&self.parameters, scale.tensor());
        let checked = match norm_type {
            Some(norm_type) => plan.norm(parameters, norm_type, Some(number)),
            None => plan.check(parameters, number, scale.may_enlarge()),
        };
        let Findings { found, norm } = checked?;
        (self.stage, self.found, self.norm) = (Stage::Checked, found, norm);
        Ok(())
    }

    /// Records that unscaling may have stopped midway.
    pub(super) fn set_broken(&mut self) {
        self.stage = Stage::Broken;
        // `update` compares with this to see whether they were zeroed.
        if let Ok(now) = Snapshot::of(&self.parameters) {
            self.snapshot = now;
        }
    }

    /// Fails while the gradients of a broken record are still those that were left half unscaled.
    pub(super) fn check_zeroed(&self) -> Result<()> {
        if self.stage != Stage::Broken {
            return Ok(());
        }
        let now = ffi::gradients_inspect(&self.parameters)?;
        let kept = |(known, now): (&Gradient, &Gradient)| {
            now.exists() && change(Some(known), now) == Change::None
        };
        match self.snapshot.iter().zip(&now).any(kept) {
            true => Err(Error::Scaler(ScalerError::UnscaleFailed)),
            false => Ok(()),
        }
    }

    /// Forgets everything. The gradients stay as they are.
    pub(super) fn remove(&mut self) {
        self.stage = Stage::Removed;
        self.snapshot.truncate(0);
        self.parameters.clear();
        self.found.clear();
        (self.norm, self.widened) = (None, None);
        self.rests.clear();
    }

    /// Gives the gradients the dtypes from before the record. They have these numbers in f32, which need memory only if
    /// the gradients are on a device; without it, they stay f32.
    pub(super) fn undo_widening(&self) {
        if let Some(widened) = &self.widened {
            let _failed = widened.undo(&self.parameters);
        }
    }

    /// Records that the step was taken or skipped.
    pub(super) fn set_stepped(&mut self) {
        // libtorch's kernels for other devices unscale in place. Without the new versions, the gradients only count as
        // changed.
        let on_device = |gradient: &Gradient| gradient.exists() && !gradient.is_on_cpu();
        if self.stage == Stage::Checked
            && self.snapshot.iter().any(on_device)
            && let Ok(now) = Snapshot::of(&self.parameters)
        {
            self.snapshot = now;
        }
        self.stage = Stage::Stepped;
    }

    /// Notes what is left of the gradients that were changed in place since the step.
    pub(super) fn record_leftovers(&mut self) -> Result<()> {
        let now = ffi::gradients_inspect(&self.parameters)?;
        let changed = self.snapshot.iter().zip(&now).enumerate();
        let changed =
            changed.filter(|(_, (known, now))| change(Some(known), now) == Change::Numbers);
        let changed: Vec<_> = changed.map(|(index, _)| index).collect();
        if changed.is_empty() {
            return Ok(());
        }
        let mut now = Snapshot::of(&self.parameters)?;
        for index in changed {
            let rest = ffi::gradient_rest(&self.parameters[index], self.rests.get(&index))?;
            self.rests.insert(index, rest);
            self.snapshot.exchange(&mut now, index);
        }
        Ok(())
    }

    /// The flag that says whether something is left of a gradient, if that was changed after the step.
    pub(super) fn rest(&self, index: usize) -> Option<&Tensor> {
        self.rests.get(&index)
    }

    /// Returns whether something is left of a gradient. Synchronizes if that was changed on a GPU after the step.
    pub(super) fn is_leftover(&self, index: usize) -> Result<bool> {
        self.rest(index).map_or(Ok(true), |rest| ffi::any_nonzero(&[rest]))
    }

    /// Compares the gradients with those that were unscaled, and marks the record for another check if values changed.
    /// Fails at the first gradient that is not the one that was unscaled.
    pub(super) fn compare(&mut self, gradients: &Gradients<'_>) -> Result<()> {
        for (index, gradient) in gradients.snapshot().iter().enumerate() {
            let how = match change(self.snapshot.get(index), gradient) {
                Change::None => continue,
                Change::Numbers if self.rescaled => GradientChange::AfterAnotherLoss,
                Change::Numbers => {
                    self.dirty = true;
                    continue;
                }
                Change::Replaced(how) => how,
            };
            let parameter = gradients.describe(index);
            return Err(Error::Gradient(GradientError::Changed { parameter, how }));
        }
        Ok(())
    }

    /// Compares like [`compare`](Self::compare), drops the gradients of parameters that were frozen since, and checks
    /// gradients whose values changed.
    pub(super) fn verify(&mut self, gradients: Gradients<'_>, scale: &Tensor) -> Result<()> {
        self.compare(&gradients)?;
        gradients.drop_frozen()?;
        if !self.dirty {
            return Ok(());
        }
        let plan = Plan::new(&gradients, true)?;
        let findings = plan.check(gradients.parameters(), scale, false)?;
        self.found.extend(findings.found);
        self.replace_snapshot(gradients.into_snapshot());
        self.dirty = false;
        Ok(())
    }

    /// Accepts the gradients after a change by this crate. They are checked again only if the change can have made one
    /// non-finite.
    pub(super) fn accept_own_change(&mut self, now: Snapshot, recheck: bool) {
        self.replace_snapshot(now);
        self.dirty |= recheck;
    }

    /// Accepts the gradients. Those of parameters that the optimizer has gained since are not the record's.
    fn replace_snapshot(&mut self, mut now: Snapshot) {
        now.truncate(self.parameters.len());
        self.snapshot = now;
    }

    /// Accepts new values, but neither replaced nor new gradients, nor those to which a backward may have added: the
    /// step refuses these.
    pub(super) fn accept(&mut self, mut now: Snapshot, may_be_sum: impl Fn(usize) -> bool) {
        for index in 0..self.snapshot.len().min(now.len()) {
            let numbers = change(self.snapshot.get(index), &now[index]) == Change::Numbers
                && !may_be_sum(now[index].parameter());
            self.dirty |= numbers;
            if numbers || !now[index].exists() {
                self.snapshot.exchange(&mut now, index);
            }
        }
    }

    /// Returns whether a failed step left the gradients as they were. On the CPU it never changes them.
    pub(super) fn is_untouched(&self) -> bool {
        if overflow(&self.found).is_some() {
            return true;
        }
        let same = |(known, now): (_, &Gradient)| change(Some(known), now) == Change::None;
        match ffi::gradients_inspect(&self.parameters) {
            Ok(now) => self.snapshot.iter().zip(&now).all(same),
            Err(_) => false,
        }
    }

    /// Returns whether the record allows a step. Does not synchronize: the answer is a flag on a device if the host has
    /// not read it.
    pub(super) fn overflow_check(&self) -> Result<OverflowCheck> {
        if let Some(found) = overflow(&self.found) {
            return Ok(OverflowCheck::Known(!found));
        }
        Ok(OverflowCheck::Unless(ffi::flags_join(self.found.iter().map(|flag| &flag.tensor))?))
    }

    /// Returns whether a gradient was non-finite. Synchronizes, once, if only devices have the answer.
    pub(super) fn found_inf(&mut self) -> Result<bool> {
        if let Some(found) = overflow(&self.found) {
            return Ok(found);
        }
        let flags: Vec<_> = self.found.iter().map(|flag| &flag.tensor).collect();
        let found = ffi::any_nonzero(&flags)?;
        for flag in &mut self.found {
            // Only the sum of the flags matters, and it is known now.
            flag.host = Some(found);
        }
        Ok(found)
    }
}

//! What is known of one optimizer since the last `update`.

use std::collections::HashMap;

use tch::Tensor;

use crate::error::{GradientChange, Result};
use crate::ffi::{self, FoundInf, Gradient, Snapshot, Widened};
use crate::gradients::{Change, Gradients, change, overflow};

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

/// An optimizer, recognised by its parameters.
#[derive(Debug)]
pub(crate) struct Record {
    pub(super) stage: Stage,
    /// The gradients as unscaling left them, in the order of the parameters.
    pub(super) snapshot: Snapshot,
    /// The parameters, kept alive so that their identities stay theirs until the iteration ends.
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
    /// What was done to half-precision gradients before they were unscaled or their norm was taken.
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

    pub(super) fn set_broken(&mut self) {
        self.stage = Stage::Broken;
        // `update` compares with this to see whether they were zeroed.
        if let Ok(now) = Snapshot::of(&self.parameters) {
            self.snapshot = now;
        }
    }

    /// Forgets everything.
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

    /// Whether something is left of a gradient. Synchronizes if that was changed on a GPU after the step.
    pub(super) fn is_leftover(&self, index: usize) -> Result<bool> {
        self.rest(index).map_or(Ok(true), |rest| ffi::any_nonzero(&[rest]))
    }

    /// Marks the record if values changed; fails at the first gradient that is not the one that was unscaled.
    pub(super) fn compare(
        &mut self,
        now: &[Gradient],
    ) -> std::result::Result<(), (usize, GradientChange)> {
        for (index, gradient) in now.iter().enumerate() {
            match change(self.snapshot.get(index), gradient) {
                Change::None => {}
                Change::Numbers if self.rescaled => {
                    return Err((index, GradientChange::AfterAnotherLoss));
                }
                Change::Numbers => self.dirty = true,
                Change::Replaced(how) => return Err((index, how)),
            }
        }
        Ok(())
    }

    /// Accepts the gradients. Those of parameters that the optimizer has gained since are not the record's.
    pub(super) fn replace_snapshot(&mut self, mut now: Snapshot) {
        now.truncate(self.parameters.len());
        self.snapshot = now;
    }

    /// Accepts new values, but neither replaced nor new gradients: the step refuses those.
    pub(super) fn accept(&mut self, mut now: Snapshot) {
        for index in 0..self.snapshot.len().min(now.len()) {
            let numbers = change(self.snapshot.get(index), &now[index]) == Change::Numbers;
            self.dirty |= numbers;
            if numbers || !now[index].exists() {
                self.snapshot.exchange(&mut now, index);
            }
        }
    }

    /// Whether a failed step left the gradients as they were. On the CPU it never changes them.
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

    /// Whether a gradient was non-finite. Synchronizes, once, if only devices have the answer.
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

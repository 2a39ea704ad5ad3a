//! What has happened to which optimizer since the last `update`.

#![forbid(unsafe_code)]

use tch::{Kind, Tensor};

use crate::error::{Error, Result};
use crate::ffi::{self, HeldGradients, Interrupted};
use crate::scaler::addresses::AddressMap;
use crate::scaler::found::{FoundInf, Verdict, common_norm, overflow, recycle, tensors};
use crate::scaler::gradients::{Change, Plan, change};
use crate::scaler::scale::Scale;
use crate::sys::{self, Gradient};

/// How far an optimizer has come in this iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Some gradients may be unscaled and some not: libtorch failed in between.
    Broken,
    /// They were looked at and are still scaled: a step is under way.
    Looked,
    Unscaled,
    Stepped,
}

/// How the gradients of a new record are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// They are unscaled in place.
    Unscale,
    /// They are left scaled, for an optimizer that unscales them.
    Check,
    /// As `Check`, and their norm is taken.
    Norm,
}

/// An optimizer, recognised by its parameters.
#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) stage: Stage,
    /// The gradients as unscaling left them, in the order of the parameters.
    gradients: HeldGradients,
    /// The parameters, kept alive so that their identities stay theirs until the iteration ends.
    parameters: Vec<Tensor>,
    found: Vec<FoundInf>,
    /// Numbers changed since unscaling, so that they have to be looked at again.
    dirty: bool,
    /// A loss was scaled since unscaling, so that a change may come from its backward.
    rescaled: bool,
    /// The norm of the unscaled gradients, where it was taken.
    norm: Option<Tensor>,
}

/// Whose a list of parameters is.
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
    /// The gradients that have been unscaled, and what holds their numbers, by parameter.
    unscaled: AddressMap<(usize, usize)>,
    /// Flags of records were taken: the iteration is open without them.
    taken: bool,
    /// found_inf tensors of earlier iterations, to be used again.
    spare: Vec<Tensor>,
}

impl Iteration {
    pub(crate) fn is_open(&self) -> bool {
        self.taken || !self.records.is_empty()
    }

    pub(crate) fn stage(&self, record: usize) -> Stage {
        self.records[record].stage
    }

    pub(crate) fn set_stage(&mut self, record: usize, stage: Stage) {
        self.records[record].stage = stage;
    }

    /// Notes that some gradients may be unscaled by now and some not.
    pub(crate) fn set_broken(&mut self, record: usize) {
        let record = &mut self.records[record];
        record.stage = Stage::Broken;
        // What `update` will find changed once they are zeroed.
        if let Ok(gradients) = HeldGradients::of(&record.parameters) {
            record.gradients = gradients;
        }
    }

    /// Finds whose parameters these are. An optimizer that has gained some since is still the same, as long as those
    /// have no gradients, which nobody has unscaled.
    pub(crate) fn owner(&self, gradients: &[Gradient]) -> Owner {
        let gained_none = |record: &usize| {
            let known = self.records[*record].gradients.len();
            gradients[known..].iter().all(|g| g.gradient == 0)
        };
        if let Some(record) = self.find(gradients).filter(gained_none) {
            return Owner::Record(record);
        }
        let shared = |g: &Gradient| {
            g.gradient != 0 && self.unscaled.get(&g.parameter) == Some(&(g.gradient, g.memory))
        };
        gradients.iter().position(shared).map_or(Owner::Nobody, Owner::Shared)
    }

    /// Finds the record whose parameters these begin with.
    pub(crate) fn find(&self, gradients: &[Gradient]) -> Option<usize> {
        self.records.iter().position(|record| {
            let known = &record.gradients;
            let pairs = || known.iter().zip(gradients);
            known.len() <= gradients.len() && pairs().all(|(a, b)| a.parameter == b.parameter)
        })
    }

    /// Looks at what `plan` lists and opens a record; without any gradient there is nothing to record.
    pub(crate) fn open(
        &mut self,
        parameters: Vec<Tensor>,
        gradients: HeldGradients,
        plan: &Plan,
        scale: &Scale,
        look: Look,
    ) -> Result<Option<usize>> {
        for &frozen in &plan.frozen {
            ffi::gradient_drop(&parameters[frozen])?;
        }
        if plan.groups.is_empty() {
            return Ok(None);
        }
        let index = self.records.len();
        self.records.push(Record {
            stage: Stage::Broken,
            gradients,
            parameters,
            found: Vec::new(),
            dirty: false,
            rescaled: false,
            norm: None,
        });
        let filled = match look {
            Look::Unscale => self.fill(index, plan, scale),
            Look::Check | Look::Norm => self.look(index, plan, scale, look == Look::Norm),
        };
        if filled.is_err() && look != Look::Unscale {
            // Nothing was changed.
            self.abandon(index);
        }
        filled?;
        Ok(Some(index))
    }

    /// Unscales the gradients of a new record. If that fails before it has changed any there is no record; if it fails
    /// midway the record stays broken.
    fn fill(&mut self, index: usize, plan: &Plan, scale: &Scale) -> Result<()> {
        let parameters = std::mem::take(&mut self.records[index].parameters);
        let options = match scale.is_one() {
            true => sys::UNSCALE_CHECK_ONLY,
            false => u8::from(scale.may_enlarge()) * sys::UNSCALE_RECHECK,
        };
        let checked = self.check(&parameters, plan, scale.tensor(), options);
        let gradients = HeldGradients::of(&parameters);
        let record = &mut self.records[index];
        record.parameters = parameters;
        match checked {
            Ok(found) => {
                record.gradients = gradients?;
                (record.stage, record.found) = (Stage::Unscaled, found);
                self.unscaled.extend(record.unscaled());
                Ok(())
            }
            Err(Interrupted { error, begun: false }) => {
                self.abandon(index);
                Err(error)
            }
            Err(Interrupted { error, begun: true }) => {
                // What `update` will find changed once they are zeroed.
                if let Ok(gradients) = gradients {
                    record.gradients = gradients;
                }
                Err(error)
            }
        }
    }

    /// Looks at the gradients of a new record and leaves them as they are.
    fn look(&mut self, index: usize, plan: &Plan, scale: &Scale, with_norm: bool) -> Result<()> {
        let parameters = std::mem::take(&mut self.records[index].parameters);
        let looked = match with_norm {
            true => self.norms(&parameters, plan, scale.tensor()).map(|(f, norm)| (f, Some(norm))),
            false => {
                let found = self.check(&parameters, plan, scale.tensor(), sys::UNSCALE_CHECK_ONLY);
                found.map(|found| (found, None)).map_err(|interrupted| interrupted.error)
            }
        };
        let record = &mut self.records[index];
        record.parameters = parameters;
        (record.found, record.norm) = looked?;
        record.stage = Stage::Looked;
        self.unscaled.extend(record.unscaled());
        Ok(())
    }

    /// Takes the norm of the unscaled gradients over all groups of `plan`.
    fn norms(
        &mut self,
        parameters: &[Tensor],
        plan: &Plan,
        scale: &Tensor,
    ) -> Result<(Vec<FoundInf>, Tensor)> {
        let (mut found, mut norms) = (Vec::new(), Vec::new());
        for (_, indices) in &plan.groups {
            let group: Vec<&Tensor> = indices.iter().map(|&i| &parameters[i]).collect();
            let tensor = self.spare_found_inf(group[0])?;
            let (norm, host) = ffi::gradients_norm(&group, scale, &tensor)?;
            found.push(FoundInf { tensor, host, lent: false });
            norms.push(norm);
        }
        Ok((found, common_norm(norms)?))
    }

    /// Runs the kernels over the groups of `plan`, in one call for all of them.
    fn check(
        &mut self,
        parameters: &[Tensor],
        plan: &Plan,
        scale: &Tensor,
        options: u8,
    ) -> std::result::Result<Vec<FoundInf>, Interrupted> {
        let firsts = plan.groups.iter().map(|(_, indices)| &parameters[indices[0]]);
        let tensors: Result<Vec<_>> = firsts.map(|first| self.spare_found_inf(first)).collect();
        let tensors = tensors.map_err(|error| Interrupted { error, begun: false })?;
        let all = plan.groups.iter().flat_map(|(_, indices)| indices).map(|&i| &parameters[i]);
        let answers = ffi::gradients_unscale(all, scale, &tensors, options)?;
        let found = tensors.into_iter().zip(answers);
        Ok(found.map(|(tensor, host)| FoundInf { tensor, host, lent: false }).collect())
    }

    /// A found_inf tensor on the device of a parameter.
    fn spare_found_inf(&mut self, parameter: &Tensor) -> Result<Tensor> {
        let device = parameter.device();
        match self.spare.iter().position(|tensor| tensor.device() == device) {
            Some(index) => Ok(self.spare.swap_remove(index)),
            None => ffi::number_new(0.0, Kind::Float, device),
        }
    }

    /// Notes that a loss is being scaled: from here on, a change of an unscaled gradient may be its backward.
    pub(crate) fn note_scale(&mut self) -> Result<()> {
        for record in self.records.iter_mut().filter(|record| record.stage == Stage::Unscaled) {
            let now = HeldGradients::of(&record.parameters)?;
            record.accept(now);
            record.rescaled = true;
        }
        Ok(())
    }

    /// Compares the gradients with those that were unscaled; those with other numbers will be looked at again.
    pub(crate) fn compare(
        &mut self,
        record: usize,
        now: &[Gradient],
        describe: &dyn Fn(usize) -> String,
    ) -> Result<()> {
        let compared = self.records[record].compare(now);
        compared.map_err(|(index, how)| Error::GradientChanged { parameter: describe(index), how })
    }

    /// Takes over the gradients as they are now, after a change of our own. They are looked at again only if it can
    /// have made one infinite or NaN.
    pub(crate) fn accept(&mut self, record: usize, now: HeldGradients, look_again: bool) {
        let record = &mut self.records[record];
        record.gradients = now;
        record.dirty |= look_again;
    }

    /// The norm of the unscaled gradients, where it was taken.
    pub(crate) fn norm(&self, record: usize) -> Option<Tensor> {
        self.records[record].norm.as_ref().map(Tensor::shallow_clone)
    }

    /// Whether a step that failed has left the gradients as they were. Those on the CPU it never changes.
    pub(crate) fn is_untouched(&self, record: usize) -> bool {
        let record = &self.records[record];
        if overflow(&record.found).is_some() {
            return true;
        }
        let same = |(known, now): (_, &Gradient)| change(Some(known), now) == Change::None;
        match ffi::gradients_inspect(&record.parameters) {
            Ok(now) => record.gradients.iter().zip(&now).all(same),
            Err(_) => false,
        }
    }

    /// Tells whether there are broken records; fails as long as the gradients of one are still those that were left half
    /// unscaled.
    pub(crate) fn check_broken(&self) -> Result<bool> {
        let mut any = false;
        for record in self.records.iter().filter(|record| record.stage == Stage::Broken) {
            let now = ffi::gradients_inspect(&record.parameters)?;
            let kept = |(known, now): (&Gradient, &Gradient)| {
                now.gradient != 0 && change(Some(known), now) == Change::None
            };
            if record.gradients.iter().zip(&now).any(kept) {
                return Err(Error::UnscaleFailed);
            }
            any = true;
        }
        Ok(any)
    }

    /// Whether the record allows a step. Does not wait: where only devices know, the answer is a flag on one of them.
    pub(crate) fn verdict(&mut self, record: usize) -> Result<Verdict> {
        let record = &mut self.records[record];
        if let Some(found) = overflow(&record.found) {
            return Ok(Verdict::Known(!found));
        }
        let flag = ffi::flags_join(record.found.iter().map(|flag| &flag.tensor))?;
        if let [only] = record.found.as_mut_slice() {
            only.lent = true;
        }
        Ok(Verdict::Unless(flag))
    }

    /// Compares as [`compare`](Self::compare), and looks again at gradients with other numbers.
    pub(crate) fn verify(
        &mut self,
        record: usize,
        parameters: &[Tensor],
        now: Vec<Gradient>,
        scale: &Tensor,
        describe: &dyn Fn(usize) -> String,
    ) -> Result<()> {
        self.compare(record, &now, describe)?;
        if !self.records[record].dirty {
            return Ok(());
        }
        let plan = Plan::new(&now, true, describe)?;
        let now = HeldGradients::new(parameters, now)?;
        let found = self.check(parameters, &plan, scale, sys::UNSCALE_CHECK_ONLY);
        let found = found.map_err(|interrupted| interrupted.error)?;
        let known = &mut self.records[record];
        known.gradients = now;
        known.dirty = false;
        known.found.extend(found);
        Ok(())
    }

    /// Whether a gradient of the record was infinite or NaN. Waits for the devices when only they know, once.
    pub(crate) fn found_inf(&mut self, record: usize) -> Result<bool> {
        let record = &mut self.records[record];
        let host = overflow(&record.found);
        let found = match host {
            Some(found) => found,
            None => ffi::any_nonzero(&tensors(&record.found))?,
        };
        if host.is_none() {
            for flag in &mut record.found {
                // Their sum is what counts, and the sum is known now.
                flag.host = Some(found);
            }
        }
        Ok(found)
    }

    /// All found_inf tensors, and their sum where the host knows it.
    pub(crate) fn found_infs(&self) -> (Vec<&Tensor>, Option<bool>) {
        let found = || self.records.iter().flat_map(|record| &record.found);
        (found().map(|flag| &flag.tensor).collect(), overflow(found()))
    }

    /// Has the step of a record depend on another look, too.
    pub(crate) fn add_found(&mut self, record: usize, found: FoundInf) {
        self.records[record].found.push(found);
    }

    /// Forgets a record and returns what was found in its gradients, which stay unscaled.
    pub(crate) fn take_found(&mut self, record: usize) -> Vec<FoundInf> {
        let found = std::mem::take(&mut self.records[record].found);
        self.abandon(record);
        found
    }

    pub(crate) fn set_taken(&mut self, taken: bool) {
        self.taken = taken;
    }

    /// Takes back what `take_found` gave, at the end of the iteration.
    pub(crate) fn recycle(&mut self, found: impl IntoIterator<Item = FoundInf>) {
        recycle(&mut self.spare, found);
        self.taken = false;
    }

    /// Forgets a record. Its gradients stay unscaled.
    pub(crate) fn abandon(&mut self, record: usize) {
        let record = self.records.remove(record);
        recycle(&mut self.spare, record.found);
        for gradient in record.gradients.iter() {
            self.unscaled.remove(&gradient.parameter);
        }
    }

    /// Ends the iteration.
    pub(crate) fn close(&mut self) {
        recycle(&mut self.spare, self.records.drain(..).flat_map(|record| record.found));
        self.unscaled.clear();
    }
}

impl Record {
    /// The gradients, and what holds their numbers, by parameter.
    fn unscaled(&self) -> impl Iterator<Item = (usize, (usize, usize))> {
        self.gradients.iter().map(|g| (g.parameter, (g.gradient, g.memory)))
    }

    /// Notes which gradients have other numbers; fails at the first that is not the one that was unscaled.
    fn compare(&mut self, now: &[Gradient]) -> std::result::Result<(), (usize, &'static str)> {
        for (index, gradient) in now.iter().enumerate() {
            match change(self.gradients.get(index), gradient) {
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

    /// Takes over new numbers, but neither new tensors nor new gradients: the step will refuse those.
    fn accept(&mut self, mut now: HeldGradients) {
        for index in 0..self.gradients.len().min(now.len()) {
            let numbers = change(self.gradients.get(index), &now[index]) == Change::Numbers;
            self.dirty |= numbers;
            if numbers || now[index].gradient == 0 {
                self.gradients.exchange(&mut now, index);
            }
        }
    }
}

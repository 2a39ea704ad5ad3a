//! Unscaling and stepping an optimizer.

#![forbid(unsafe_code)]

use tch::Tensor;
use tch::nn::VarStore;

use crate::autocast;
use crate::error::{Error, Result};
use crate::ffi::{self, HeldGradients};
use crate::optim::AmpOptimizer;
use crate::scaler::gradients::{self, Plan};
use crate::scaler::iteration::{Iteration, Look, Owner, Stage};
use crate::scaler::outcome::Step;
use crate::scaler::scale::Scale;
use crate::scaler::{GradScaler, StepOutcome, Unscaled, refuse_sparse};
use crate::sys::Gradient;

/// The gradients of an optimizer that has a record.
struct Claimed<'a> {
    parameters: &'a [Tensor],
    now: Vec<Gradient>,
    describe: &'a dyn Fn(usize) -> String,
}

fn appeared(parameter: String) -> Error {
    let how = "appeared";
    Error::GradientChanged { parameter, how }
}

/// Whether a step is the next to come.
pub(crate) fn due(stage: Stage) -> Result<()> {
    match stage {
        Stage::Broken => Err(Error::UnscaleFailed),
        Stage::Looked | Stage::Stepped => Err(Error::AlreadyStepped),
        Stage::Unscaled => Ok(()),
    }
}

fn take_step(optimizer: &mut dyn AmpOptimizer) -> Result<()> {
    autocast::forgetting_casts(|| optimizer.step())
}

impl GradScaler {
    /// Divides the gradients of an optimizer's parameters by the scale, in place, and records whether any is infinite
    /// or NaN. As `unscale_` in PyTorch; [`unscale`](Self::unscale) returns a transaction besides. Waits for the device
    /// only where gradients on the CPU meet a scale on a GPU.
    ///
    /// Needed only to look at or change gradients before [`step`](Self::step), which does it otherwise. Gradients may
    /// be f32, f64, bf16 or complex, dense in any layout or COO sparse, on several devices; missing ones are left out,
    /// and a gradient that a frozen parameter still carries is dropped. Clip before the next loss is scaled.
    ///
    /// # Errors
    ///
    /// [`Error::AlreadyUnscaled`], [`Error::UnscaleAfterStep`], [`Error::SharedParameter`] and [`Error::Gradient`]; no
    /// gradient is touched then. [`Error::Torch`] when libtorch itself fails: all gradients are as before where memory ran
    /// out, and the call can be made again; where it fails midway, [`Error::UnscaleFailed`] follows.
    pub fn unscale_(&mut self, optimizer: &mut dyn AmpOptimizer) -> Result<()> {
        self.check_whole("backward")?;
        self.open(optimizer)?;
        Ok(())
    }

    /// Unscales in place as [`unscale_`](Self::unscale_) and returns a transaction that clips and steps. PyTorch has no
    /// twin. The scaler is shared, so that several optimizers can be in transactions at once.
    ///
    /// # Errors
    ///
    /// As [`unscale_`](Self::unscale_).
    pub fn unscale<'a>(&'a self, optimizer: &'a mut dyn AmpOptimizer) -> Result<Unscaled<'a>> {
        self.check_whole("backward")?;
        let record = self.open(optimizer)?;
        Ok(Unscaled::new(self, optimizer, record))
    }

    /// Steps the optimizer if all its gradients are finite, and unscales them first unless that was done.
    ///
    /// A fused [`Optimizer`](crate::optim::Optimizer) unscales and skips on the device, and nobody waits; its gradients
    /// stay scaled, unless libtorch's kernel for the device writes them back. For other optimizers with gradients on a
    /// GPU the host waits for the answer, in one transfer for all parameters and devices. Numbers that changed since
    /// `unscale_`, as clipping changes them, are checked again. After a step the autocast weight cache is cleared.
    ///
    /// # Errors
    ///
    /// [`Error::AlreadyStepped`]; [`Error::GradientChanged`] when a gradient is not the one that was unscaled, because
    /// it appeared, was replaced, or changed after another loss was scaled; those of [`unscale_`](Self::unscale_); and
    /// what the optimizer's own step returns.
    pub fn step(&mut self, optimizer: &mut dyn AmpOptimizer) -> Result<StepOutcome> {
        self.check_whole("step")?;
        self.step_shared(optimizer)
    }

    pub(crate) fn step_shared(&self, optimizer: &mut dyn AmpOptimizer) -> Result<StepOutcome> {
        if self.scale.is_none() {
            take_step(optimizer)?;
            return Ok(StepOutcome::known(Step::Stepped));
        }
        if optimizer.amp_scaling().is_some() {
            return self.step_scaled(optimizer, None);
        }
        self.prepare_unscale(optimizer)?;
        match self.claim_for_step(optimizer, Look::Unscale)? {
            Some(record) => self.finish(record, optimizer),
            None => Ok(StepOutcome::known(Step::NoGradients)),
        }
    }

    /// Finds the record whose step is due, or makes one by a look at the gradients.
    pub(crate) fn claim_for_step(
        &self,
        optimizer: &dyn AmpOptimizer,
        look: Look,
    ) -> Result<Option<usize>> {
        self.claim(optimizer, look, |iteration, record, scale, claimed| {
            due(iteration.stage(record))?;
            let Claimed { parameters, now, describe } = claimed;
            iteration.verify(record, parameters, now, scale.tensor(), describe)
        })
    }

    /// Takes the step that the record allows.
    fn finish(&self, record: usize, optimizer: &mut dyn AmpOptimizer) -> Result<StepOutcome> {
        let found_inf = self.iteration.borrow_mut().found_inf(record)?;
        let step = if found_inf {
            Step::Skipped
        } else {
            // Nothing is borrowed meanwhile: the optimizer may use the scaler.
            take_step(optimizer)?;
            Step::Stepped
        };
        let mut iteration = self.iteration.borrow_mut();
        iteration.set_stage(record, Stage::Stepped);
        Ok(StepOutcome::known(step))
    }

    /// Lets the optimizer prepare its gradients.
    pub(crate) fn prepare_unscale(&self, optimizer: &mut dyn AmpOptimizer) -> Result<()> {
        if self.scale.is_some() { optimizer.prepare_unscale() } else { Ok(()) }
    }

    /// Finds the record of an optimizer that has been unscaled or stepped since the last update.
    pub(crate) fn record(&self, optimizer: &dyn AmpOptimizer) -> Result<Option<usize>> {
        let now = ffi::gradients_inspect(&optimizer.parameters())?;
        Ok(self.iteration.borrow().find(&now))
    }

    /// Unscales and returns the record; `None` when there is nothing to record.
    pub(crate) fn open(&self, optimizer: &mut dyn AmpOptimizer) -> Result<Option<usize>> {
        self.prepare_unscale(optimizer)?;
        self.claim(optimizer, Look::Unscale, |iteration, record, _, _| {
            Err(match iteration.stage(record) {
                Stage::Broken => Error::UnscaleFailed,
                Stage::Unscaled => Error::AlreadyUnscaled,
                Stage::Looked | Stage::Stepped => Error::UnscaleAfterStep,
            })
        })
    }

    /// Returns the record of the optimizer's parameters: a new one, by a look at the gradients, or what `known` says of
    /// an old one.
    fn claim(
        &self,
        optimizer: &dyn AmpOptimizer,
        look: Look,
        known: impl FnOnce(&mut Iteration, usize, &Scale, Claimed<'_>) -> Result<()>,
    ) -> Result<Option<usize>> {
        let Some(scale) = &self.scale else {
            return Ok(None);
        };
        let parameters = optimizer.parameters();
        let describe = |index| self.describe(optimizer, &parameters, index);
        let now = ffi::gradients_inspect(&parameters)?;
        let mut iteration = self.iteration.borrow_mut();
        match iteration.owner(&now) {
            Owner::Shared(index) => Err(Error::SharedParameter { parameter: describe(index) }),
            Owner::Record(record) => {
                let (parameters, describe) = (&*parameters, &describe);
                let claimed = Claimed { parameters, now, describe };
                known(&mut iteration, record, scale, claimed).map(|()| Some(record))
            }
            Owner::Nobody => {
                // Where nothing is written back, no small value is lost.
                let writes = look == Look::Unscale && !self.config.is_one();
                let allow_fp16 = self.config.allow_fp16_gradients || !writes;
                let plan = Plan::new(&now, allow_fp16, &describe)?;
                if look == Look::Norm {
                    refuse_sparse(&now, &describe)?;
                }
                let held = HeldGradients::new(&parameters, now)?;
                iteration.open(parameters.into_owned(), held, &plan, scale, look)
            }
        }
    }

    /// Changes the gradients of an unscaled optimizer and remembers that it was us. `look_again` if that can make one
    /// infinite or NaN.
    pub(crate) fn change_gradients<T>(
        &self,
        record: Option<usize>,
        optimizer: &dyn AmpOptimizer,
        look_again: bool,
        change: impl FnOnce(&[Tensor]) -> Result<T>,
    ) -> Result<T> {
        let parameters = optimizer.parameters();
        let describe = |index| self.describe(optimizer, &parameters, index);
        let now = ffi::gradients_inspect(&parameters)?;
        let Some(record) = record else {
            return match now.iter().position(|g| g.gradient != 0 && self.is_enabled()) {
                Some(index) => Err(appeared(describe(index))),
                None => change(&parameters),
            };
        };
        let mut iteration = self.iteration.borrow_mut();
        iteration.compare(record, &now, &describe)?;
        let changed = change(&parameters)?;
        iteration.accept(record, HeldGradients::of(&parameters)?, look_again);
        Ok(changed)
    }

    /// Forgets that an optimizer was unscaled in this iteration, for a loop that decides not to step it and not to
    /// call `update` either. Its gradients stay as they are: zero them before the next backward. PyTorch has no twin.
    ///
    /// An overflow that was found is forgotten, too: where it is the reason, call `update` instead, or the scale will
    /// never sink. An optimizer that is dropped counts until `update`, unless it is abandoned before. Nothing happens
    /// to one that was not unscaled.
    ///
    /// # Errors
    ///
    /// [`Error::AlreadyStepped`] when its step was taken or skipped; [`Error::Torch`] if its parameters cannot be read.
    pub fn abandon(&mut self, optimizer: &mut dyn AmpOptimizer) -> Result<()> {
        let now = ffi::gradients_inspect(&optimizer.parameters())?;
        let iteration = self.iteration.get_mut();
        match iteration.find(&now) {
            Some(record) if iteration.stage(record) == Stage::Stepped => Err(Error::AlreadyStepped),
            Some(record) => {
                iteration.abandon(record);
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Takes the names of a VarStore's variables, for messages about their gradients, and keeps handles to them as long
    /// as the scaler lives. Variables that are added later need another call. PyTorch has no twin.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if the variables cannot be read.
    pub fn name_parameters(&mut self, vs: &VarStore) -> Result<()> {
        let (names, tensors): (Vec<_>, Vec<_>) = vs.variables().into_iter().unzip();
        let identities = ffi::identities(&tensors)?;
        let named = names.into_iter().zip(tensors);
        self.names.extend(identities.into_iter().zip(named));
        Ok(())
    }

    pub(crate) fn describe(
        &self,
        optimizer: &dyn AmpOptimizer,
        all: &[Tensor],
        index: usize,
    ) -> String {
        let known = || {
            let identity = *ffi::identities(&all[index..=index]).ok()?.first()?;
            self.names.get(&identity).map(|(name, _)| name.clone())
        };
        gradients::describe(index, &all[index], optimizer.parameter_name(index).or_else(known))
    }
}

//! Unscaling and stepping an optimizer.

#![forbid(unsafe_code)]

use tch::Tensor;
use tch::nn::VarStore;

use crate::error::{Error, Result};
use crate::optim::AmpOptimizer;
use crate::scaler::gradients::{self, Plan};
use crate::scaler::iteration::{Owner, Stage};
use crate::scaler::outcome::Step;
use crate::scaler::{GradScaler, StepOutcome, Unscaled};
use crate::{autocast, ffi};

impl GradScaler {
    /// Divides the gradients of an optimizer's parameters by the scale, in place, and records whether any is infinite
    /// or NaN. Waits for the device only where gradients on the CPU meet a scale on a GPU.
    ///
    /// Needed only to look at or change gradients before [`step`](Self::step), which does it otherwise. Gradients may
    /// be f32, f64, bf16 or complex, dense in any layout or COO sparse, on several devices; missing ones are left out,
    /// and a gradient that a frozen parameter still carries is dropped. Clip before the next loss is scaled.
    ///
    /// # Errors
    ///
    /// [`Error::AlreadyUnscaled`], [`Error::UnscaleAfterStep`], [`Error::SharedParameter`] and [`Error::Gradient`];
    /// no gradient is touched then.
    pub fn unscale_(&mut self, optimizer: &mut dyn AmpOptimizer) -> Result<()> {
        self.open(optimizer)?;
        Ok(())
    }

    /// Unscales as [`unscale_`](Self::unscale_) and returns a transaction that clips and steps. Several optimizers can
    /// be in such transactions at once.
    ///
    /// # Errors
    ///
    /// As [`unscale_`](Self::unscale_).
    pub fn unscale<'a, O: AmpOptimizer>(&'a self, optimizer: &'a mut O) -> Result<Unscaled<'a, O>> {
        let record = self.open(optimizer)?;
        Ok(Unscaled::new(self, optimizer, record))
    }

    /// Steps the optimizer if all its gradients are finite, and unscales them first unless that was done.
    ///
    /// For gradients on a GPU the host waits for the answer, in one transfer for all parameters and devices. Numbers
    /// that changed since `unscale_`, as clipping changes them, are checked again. After a step the autocast weight
    /// cache is cleared.
    ///
    /// # Errors
    ///
    /// [`Error::AlreadyStepped`]; [`Error::GradientChanged`] when a gradient is not the one that was unscaled, because
    /// it appeared, was replaced, or changed after another loss was scaled; those of [`unscale_`](Self::unscale_); and
    /// what the optimizer's own step returns.
    pub fn step(&mut self, optimizer: &mut dyn AmpOptimizer) -> Result<StepOutcome> {
        self.step_shared(optimizer)
    }

    pub(crate) fn step_shared(&self, optimizer: &mut dyn AmpOptimizer) -> Result<StepOutcome> {
        let Some(scale) = &self.scale else {
            optimizer.step()?;
            return Ok(StepOutcome(Step::Stepped));
        };
        let parameters = optimizer.parameters();
        let describe = |index| self.describe(optimizer, &parameters, index);
        let now = ffi::gradients_inspect(&parameters)?;
        let mut iteration = self.iteration.borrow_mut();
        let record = match iteration.owner(&now) {
            Owner::Record(record) if iteration.stage(record) == Some(Stage::Stepped) => {
                return Err(Error::AlreadyStepped);
            }
            Owner::Record(record) => {
                iteration.verify(record, &parameters, now, scale.tensor(), &describe)?;
                record
            }
            Owner::Shared(index) => {
                return Err(Error::SharedParameter {
                    parameter: describe(index),
                });
            }
            Owner::Nobody => {
                let plan = Plan::new(&now, self.config.allow_fp16_gradients, &describe)?;
                let parameters = parameters.into_owned();
                match iteration.unscale(parameters, now, &plan, scale)? {
                    Some(record) => record,
                    None => return Ok(StepOutcome(Step::NoGradients)),
                }
            }
        };
        drop(iteration);
        self.finish(record, optimizer)
    }

    /// Takes the step that the record allows.
    fn finish(&self, record: usize, optimizer: &mut dyn AmpOptimizer) -> Result<StepOutcome> {
        let mut iteration = self.iteration.borrow_mut();
        let found_inf = iteration.found_inf(record)?;
        drop(iteration);
        if !found_inf {
            optimizer.step()?;
            // Inside a region the cache would go on serving the old weights.
            autocast::clear_autocast_cache();
        }
        let step = if found_inf {
            Step::Skipped
        } else {
            Step::Stepped
        };
        self.iteration
            .borrow_mut()
            .set_stage(record, Stage::Stepped);
        Ok(StepOutcome(step))
    }

    /// Unscales and returns the record; `None` when there is nothing to record.
    fn open(&self, optimizer: &mut dyn AmpOptimizer) -> Result<Option<usize>> {
        let Some(scale) = &self.scale else {
            return Ok(None);
        };
        let parameters = optimizer.parameters();
        let describe = |index| self.describe(optimizer, &parameters, index);
        let now = ffi::gradients_inspect(&parameters)?;
        let mut iteration = self.iteration.borrow_mut();
        match iteration.owner(&now) {
            Owner::Nobody => {}
            Owner::Shared(index) => {
                return Err(Error::SharedParameter {
                    parameter: describe(index),
                });
            }
            Owner::Record(record) => {
                return Err(match iteration.stage(record) {
                    Some(Stage::Stepped) => Error::UnscaleAfterStep,
                    _ => Error::AlreadyUnscaled,
                });
            }
        }
        let plan = Plan::new(&now, self.config.allow_fp16_gradients, &describe)?;
        iteration.unscale(parameters.into_owned(), now, &plan, scale)
    }

    /// Forgets that an optimizer was unscaled in this iteration, for a loop that decides not to step it and not to
    /// call `update` either. Its gradients stay unscaled: zero them before the next backward.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if the parameters cannot be read.
    pub fn abandon(&mut self, optimizer: &mut dyn AmpOptimizer) -> Result<()> {
        let now = ffi::gradients_inspect(&optimizer.parameters())?;
        let mut iteration = self.iteration.borrow_mut();
        if let Owner::Record(record) = iteration.owner(&now) {
            iteration.abandon(record);
        }
        Ok(())
    }

    /// Takes the names of a VarStore's variables, for messages about their gradients. Variables that are added later
    /// need another call.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if the variables cannot be read.
    pub fn name_parameters(&mut self, vs: &VarStore) -> Result<()> {
        let (names, tensors): (Vec<_>, Vec<_>) = vs.variables().into_iter().unzip();
        let identities = ffi::gradients_inspect(&tensors)?;
        let named = names.into_iter().zip(tensors);
        self.names
            .extend(identities.iter().map(|known| known.parameter).zip(named));
        Ok(())
    }

    fn describe(&self, optimizer: &dyn AmpOptimizer, all: &[Tensor], index: usize) -> String {
        let known = || {
            let identity = ffi::gradients_inspect(&all[index..=index])
                .ok()?
                .first()?
                .parameter;
            self.names.get(&identity).map(|(name, _)| name.clone())
        };
        gradients::describe(
            index,
            &all[index],
            optimizer.parameter_name(index).or_else(known),
        )
    }
}

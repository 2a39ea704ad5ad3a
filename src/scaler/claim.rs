//! Which record an optimizer has in this iteration, and changes of its gradients.
//!
//! An optimizer is recognized by the identities of its parameters, not by its address, so it may be moved between the
//! calls of an iteration. A record also describes the gradients. By these, the step notices that one was replaced or
//! changed, and optimizers with the same parameters are told apart: a step belongs to the gradients that it used.

use tch::Tensor;

use crate::error::{Error, GradientError, Result, ScalerError};
use crate::ffi::{self, Gradient, Snapshot};
use crate::gradients::{Gradients, Look, Plan, unclippable};
use crate::optim::AmpOptimizer;
use crate::scale::Number;
use crate::scaler::GradScaler;
use crate::scaler::iteration::{Iteration, Owner};
use crate::scaler::record::Stage;

fn appeared(parameter: String) -> Error {
    let how = "appeared";
    Error::Gradient(GradientError::Changed { parameter, how })
}

impl GradScaler {
    /// Finds the record of the gradients of an optimizer that have been unscaled or stepped with since the last update.
    pub(crate) fn record(&self, optimizer: &dyn AmpOptimizer) -> Result<Option<usize>> {
        let iteration = self.iteration.borrow();
        if !iteration.is_open() {
            return Ok(None);
        }
        let now = ffi::gradients_inspect(&optimizer.parameters())?;
        Ok(match iteration.owner(&now)? {
            Owner::Record(record) => Some(record),
            Owner::None | Owner::Shared(_) => None,
        })
    }

    /// Unscales the gradients and returns their record; `None` if there is nothing to record.
    pub(crate) fn open(&self, optimizer: &dyn AmpOptimizer) -> Result<Option<usize>> {
        self.claim(optimizer, Look::Unscale, |iteration, record, _, _| {
            Err(match iteration.stage(record) {
                Stage::Broken => Error::Scaler(ScalerError::UnscaleFailed),
                Stage::Unscaled => Error::Scaler(ScalerError::AlreadyUnscaled),
                Stage::Looked | Stage::Stepped => Error::Scaler(ScalerError::UnscaleAfterStep),
            })
        })
    }

    /// Returns the record of the optimizer's parameters, on which the ranks have agreed: a new one, or the old one if
    /// `known` accepts it.
    pub(super) fn claim(
        &self,
        optimizer: &dyn AmpOptimizer,
        look: Look,
        known: impl FnOnce(&mut Iteration, usize, &Number, Gradients<'_>) -> Result<()>,
    ) -> Result<Option<usize>> {
        let claimed = self.claim_here(optimizer, look, known);
        match &self.agreement {
            Some(agreement) if self.is_enabled() => self.agree(agreement.as_ref(), claimed),
            _ => claimed,
        }
    }

    fn claim_here(
        &self,
        optimizer: &dyn AmpOptimizer,
        look: Look,
        known: impl FnOnce(&mut Iteration, usize, &Number, Gradients<'_>) -> Result<()>,
    ) -> Result<Option<usize>> {
        self.check_synced(optimizer)?;
        let Some(scale) = self.scale.number() else {
            return Ok(None);
        };
        let mut gradients = self.gradients(optimizer)?;
        let mut iteration = self.iteration.borrow_mut();
        match iteration.owner(gradients.snapshot())? {
            Owner::Shared(index) => {
                Err(Error::Gradient(GradientError::Shared { parameter: gradients.describe(index) }))
            }
            Owner::Record(record) => {
                known(&mut iteration, record, scale, gradients).map(|()| Some(record))
            }
            Owner::None => {
                // Only writing unscaled fp16 gradients back can lose small values.
                let allow_fp16 = look != Look::Unscale || self.scale.config().may_unscale_fp16();
                // Gradients that are unscaled, or whose unscaled norm is taken, need the dtype that the optimizer
                // updates in.
                let widen = look != Look::Check && optimizer.wants_f32_gradients();
                let mut plan = Plan::new(&gradients, allow_fp16 || widen)?;
                if look == Look::Norm {
                    gradients.refuse(Gradient::is_used, unclippable)?;
                }
                let mut widened = None;
                if widen {
                    let done = ffi::gradients_widen(gradients.parameters())?;
                    let undo = |_: &Error| drop(done.undo(&optimizer.parameters()));
                    if done.any() {
                        gradients = self.gradients(optimizer).inspect_err(undo)?;
                    }
                    plan = Plan::new(&gradients, allow_fp16).inspect_err(undo)?;
                    gradients = gradients.separated().inspect_err(undo)?;
                    widened = Some(done);
                } else {
                    gradients = gradients.separated()?;
                }
                let even_empty = self.agreement.is_some();
                iteration.open(gradients, widened, &plan, scale, look, even_empty)
            }
        }
    }

    /// Inspects the gradients of an optimizer.
    pub(crate) fn gradients<'a>(
        &'a self,
        optimizer: &'a dyn AmpOptimizer,
    ) -> Result<Gradients<'a>> {
        let name = move |index, identity| {
            let known = || self.names.get(&identity).map(|(name, _)| name.clone());
            optimizer.parameter_name(index).or_else(known)
        };
        Gradients::of(optimizer.parameters(), Box::new(name))
    }

    /// Changes the gradients of an unscaled optimizer and records that the change was the scaler's own. `look_again` if
    /// it can make one non-finite.
    pub(crate) fn change_gradients<T>(
        &self,
        record: Option<usize>,
        optimizer: &dyn AmpOptimizer,
        look_again: bool,
        change: impl FnOnce(&[Tensor]) -> Result<T>,
    ) -> Result<T> {
        let gradients = self.gradients(optimizer)?;
        let Some(record) = record else {
            let mut now = gradients.snapshot().iter();
            return match now.position(|gradient| gradient.exists() && self.is_enabled()) {
                Some(index) => Err(appeared(gradients.describe(index))),
                None => change(gradients.parameters()),
            };
        };
        let mut iteration = self.iteration.borrow_mut();
        iteration.compare(record, &gradients)?;
        gradients.drop_frozen()?;
        let changed = change(gradients.parameters())?;
        iteration.accept(record, Snapshot::of(gradients.parameters())?, look_again);
        Ok(changed)
    }

    /// Removes an optimizer from this iteration, for a loop that neither steps it nor calls `update` after unscaling
    /// it. Its gradients stay as they are: zero them before the next backward. PyTorch has no counterpart.
    ///
    /// A recorded overflow is discarded, too: if it is the reason for not stepping, call `update` instead, or the scale
    /// will never back off. An optimizer that was dropped counts until `update`, unless it was abandoned before. An
    /// optimizer that was not unscaled is ignored.
    ///
    /// # Errors
    ///
    /// [`ScalerError::AlreadyStepped`] if its step was taken or skipped; [`Error::Torch`] if its parameters cannot be
    /// read.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Tensor};
    /// use tch_amp::GradScaler;
    /// use tch_amp::optim::Sgd;
    ///
    /// # let w = Tensor::from_slice(&[1f32]).set_requires_grad(true);
    /// # let mut opt = Sgd::default().build(&[w.shallow_clone()], 0.25)?;
    /// let mut scaler = GradScaler::new(Device::Cpu)?;
    /// scaler.backward(&(&w * 1e6).sum(None))?;
    /// scaler.unscale_(&mut opt)?;
    /// // This batch is an outlier: leave it out.
    /// scaler.abandon(&mut opt)?;
    /// opt.zero_grad()?;
    /// scaler.backward(&w.sum(None))?;
    /// assert!(scaler.step(&mut opt)?.is_stepped()?);
    /// scaler.update()?;
    /// assert_eq!(w.double_value(&[0]), 0.75);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn abandon(&mut self, optimizer: &mut dyn AmpOptimizer) -> Result<()> {
        let now = ffi::gradients_inspect(&optimizer.parameters())?;
        let iteration = self.iteration.get_mut();
        let is_open = |record: &usize| iteration.stage(*record) != Stage::Stepped;
        match iteration.find(&now).filter(is_open) {
            Some(record) => {
                iteration.abandon(record);
                Ok(())
            }
            None => match iteration.owner(&now)? {
                Owner::Record(_) => Err(Error::Scaler(ScalerError::AlreadyStepped)),
                Owner::None | Owner::Shared(_) => Ok(()),
            },
        }
    }
}

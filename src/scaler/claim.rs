//! Which record an optimizer has in this iteration, and what the ranks agree on about it.

use std::sync::{Arc, Weak};

use tch::{Device, Kind};

use crate::error::{Error, GradientError, Result, ScalerError};
use crate::ffi::{self, FoundInf, Gradient, Widened};
use crate::gradients::{Gradients, Plan, Preparation, unclippable};
use crate::optim::AmpOptimizer;
use crate::scale::Number;
use crate::scaler::GradScaler;
use crate::scaler::grad_scaler::{Agreement, Averaged};
use crate::scaler::iteration::{Iteration, Owner, RecordId};
use crate::scaler::record::Stage;

impl GradScaler {
    /// Finds the record of the gradients of an optimizer that have been unscaled or stepped with since the last update.
    pub(crate) fn record(&self, optimizer: &dyn AmpOptimizer) -> Result<Option<RecordId>> {
        if !self.iteration()?.is_open() {
            return Ok(None);
        }
        let now = ffi::gradients_inspect(optimizer.parameters().as_slice())?;
        Ok(match self.iteration()?.owner(&now)? {
            Owner::Record(record) => Some(record),
            Owner::None | Owner::Shared(_) => None,
        })
    }

    /// Unscales the gradients and returns their record; `None` if there is nothing to record.
    pub(crate) fn open(&self, optimizer: &dyn AmpOptimizer) -> Result<Option<RecordId>> {
        self.claim(optimizer, Preparation::Unscale, |iteration, record, _, _| {
            Err(match iteration.stage(record) {
                Stage::Broken => Error::Scaler(ScalerError::UnscaleFailed),
                Stage::Unscaled => Error::Scaler(ScalerError::AlreadyUnscaled),
                Stage::Checked | Stage::Stepped | Stage::Removed => {
                    Error::Scaler(ScalerError::UnscaleAfterStep)
                }
            })
        })
    }

    /// Returns the record of the optimizer's parameters, on which the ranks have agreed: a new one, or the old one if
    /// `known` accepts it.
    pub(super) fn claim(
        &self,
        optimizer: &dyn AmpOptimizer,
        preparation: Preparation,
        known: impl FnOnce(&mut Iteration, RecordId, &Number, Gradients<'_>) -> Result<()>,
    ) -> Result<Option<RecordId>> {
        let claimed = self.claim_here(optimizer, preparation, known);
        match &self.agreement {
            Some(agreement) if self.is_enabled() => self.agree(agreement.as_ref(), claimed),
            _ => claimed,
        }
    }

    fn claim_here(
        &self,
        optimizer: &dyn AmpOptimizer,
        preparation: Preparation,
        known: impl FnOnce(&mut Iteration, RecordId, &Number, Gradients<'_>) -> Result<()>,
    ) -> Result<Option<RecordId>> {
        self.check_synced(optimizer)?;
        let Some(scale) = self.scale.number() else {
            return Ok(None);
        };
        // The optimizer may use the scaler, so it is asked before the iteration is borrowed.
        let gradients = self.gradients(optimizer)?;
        // Gradients that are unscaled, or whose unscaled norm is taken, need the dtype that the optimizer updates in.
        let widens = preparation != Preparation::Check && optimizer.wants_f32_gradients();
        let owner = self.iteration()?.owner(gradients.snapshot())?;
        match owner {
            Owner::Shared(index) => {
                Err(Error::Gradient(GradientError::Shared { parameter: gradients.describe(index) }))
            }
            Owner::Record(record) => {
                known(&mut *self.iteration()?, record, scale, gradients).map(|()| Some(record))
            }
            Owner::None => {
                let plan = self.plan(&gradients, preparation, widens)?;
                let mut gradients = self.iteration()?.convert(gradients, &plan, scale)?;
                let (plan, widened) = self.prepare(&mut gradients, plan, preparation, widens)?;
                let even_empty = self.agreement.is_some();
                self.iteration()?.open(gradients, widened, &plan, scale, preparation, even_empty)
            }
        }
    }

    /// Checks gradients, which are unscaled in another dtype than theirs if they are `widened`.
    fn plan(
        &self,
        gradients: &Gradients<'_>,
        preparation: Preparation,
        widened: bool,
    ) -> Result<Plan> {
        let plan = Plan::new(gradients, widened || self.allows_fp16(preparation))?;
        if matches!(preparation, Preparation::Norm(_)) {
            gradients.refuse(Gradient::is_used, unclippable)?;
        }
        Ok(plan)
    }

    /// Whether gradients may be fp16: only writing unscaled ones back can lose small values.
    fn allows_fp16(&self, preparation: Preparation) -> bool {
        preparation != Preparation::Unscale || self.scale.config().may_unscale_fp16()
    }

    /// Gives checked gradients memory of their own and, if `widens`, the dtype that they are unscaled in. If it fails,
    /// they have the dtypes from before.
    fn prepare(
        &self,
        gradients: &mut Gradients<'_>,
        plan: Plan,
        preparation: Preparation,
        widens: bool,
    ) -> Result<(Plan, Option<Widened>)> {
        if !widens {
            gradients.separate()?;
            return Ok((plan, None));
        }
        let widened = ffi::gradients_widen(gradients.parameters())?;
        let mut planned = || {
            if widened.any() {
                gradients.inspect_again()?;
            }
            let plan = Plan::new(gradients, self.allows_fp16(preparation))?;
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

    /// The models whose loss was scaled, and whose gradients this rank has accumulated alone.
    fn alone(&self) -> Vec<Arc<dyn Averaged>> {
        self.ranks.iter().filter_map(Weak::upgrade).filter(|model| model.is_alone()).collect()
    }

    /// Returns an error if an optimizer has gradients that this rank has accumulated alone.
    pub(super) fn check_synced(&self, optimizer: &dyn AmpOptimizer) -> Result<()> {
        let alone = self.alone();
        if alone.is_empty() {
            return Ok(());
        }
        let identities = ffi::identities(optimizer.parameters().as_slice())?;
        if alone.iter().any(|model| model.has_any(&identities)) {
            return Err(Error::Gradient(GradientError::Unsynced));
        }
        Ok(())
    }

    /// Returns an error if the scale may change while a model accumulates gradients that were scaled by it.
    pub(super) fn check_scale_may_change(&self) -> Result<()> {
        let config = self.scale.config();
        if config.min_scale < config.max_scale && !self.alone().is_empty() {
            return Err(Error::Gradient(GradientError::Unsynced));
        }
        Ok(())
    }

    /// Adds what the other ranks have found to the record of an optimizer. If one of them has failed, a step that has
    /// not begun can be tried again.
    pub(super) fn agree(
        &self,
        agreement: &dyn Agreement,
        claimed: Result<Option<RecordId>>,
    ) -> Result<Option<RecordId>> {
        let mut iteration = self.iteration.borrow_mut();
        let record = claimed.as_ref().ok().copied().flatten();
        let found = claimed.and_then(|record| match record {
            Some(record) => iteration.found_inf(record),
            None => Ok(false),
        });
        let here = matches!(found, Ok(true));
        let agreed = agreement.any(found).and_then(|anywhere| {
            // `update` also needs the answer of a rank without gradients, which has looked at nothing.
            let is_new = |record: &RecordId| anywhere != here || !iteration.has_found(*record);
            if let Some(record) = record.filter(is_new) {
                let flag = f64::from(u8::from(anywhere));
                let tensor = ffi::number_new(flag, Kind::Float, Device::Cpu)?;
                iteration.add_found(record, FoundInf { tensor, host: Some(anywhere) });
            }
            Ok(record)
        });
        match record {
            Some(record) if agreed.is_err() && iteration.stage(record) == Stage::Checked => {
                iteration.withdraw(record);
            }
            _ => {}
        }
        agreed
    }
}

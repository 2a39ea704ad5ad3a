//! What several ranks do together: which steps they skip, and which gradients they average.

use std::fmt::Debug;
use std::sync::{Arc, Weak};

use tch::{Device, Kind};

use crate::error::{Error, GradientError, Result};
use crate::ffi::{self, FoundInf};
use crate::optim::AmpOptimizer;
use crate::scaler::GradScaler;
use crate::scaler::iteration::RecordId;
use crate::scaler::record::Stage;

/// The ranks that skip the same steps.
pub(crate) trait Agreement: Debug + Send + Sync {
    /// Returns whether any rank has found a non-finite gradient. Takes what this rank has found, or the error that kept
    /// it from looking. It returns such an error, and fails on the other ranks with its message.
    fn any(&self, found: Result<bool>) -> Result<bool>;
}

/// A model whose gradients are averaged over ranks.
pub(crate) trait Averaged: Debug + Send + Sync {
    /// Whether its gradients are now those of this rank alone.
    fn is_alone(&self) -> bool;

    /// Whether it has one of the parameters with these identities.
    fn has_any(&self, identities: &[usize]) -> bool;
}

impl GradScaler {
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
        let identities = ffi::identities(&optimizer.parameters())?;
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

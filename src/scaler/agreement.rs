//! Agreement of several ranks on the steps that are skipped.

use std::fmt::Debug;

use tch::{Device, Kind};

use crate::error::Result;
use crate::ffi::{self, FoundInf};
use crate::scaler::GradScaler;
use crate::scaler::record::Stage;

/// The ranks that skip the same steps.
pub(crate) trait Agreement: Debug + Send + Sync {
    /// Returns whether any rank has found a non-finite gradient. Takes what this rank has found, or the error that kept
    /// it from looking. It returns such an error, and fails on the other ranks with its message.
    fn any(&self, found: Result<bool>) -> Result<bool>;
}

impl GradScaler {
    /// Adds what the other ranks have found to the record of an optimizer. If one of them has failed, a step that has
    /// not begun can be tried again.
    pub(super) fn agree(
        &self,
        agreement: &dyn Agreement,
        claimed: Result<Option<usize>>,
    ) -> Result<Option<usize>> {
        let mut iteration = self.iteration.borrow_mut();
        let record = claimed.as_ref().ok().copied().flatten();
        let found = claimed.and_then(|record| match record {
            Some(record) => iteration.found_inf(record),
            None => Ok(false),
        });
        let here = matches!(found, Ok(true));
        let agreed = agreement.any(found).and_then(|anywhere| {
            // `update` also needs the answer of a rank without gradients, which has looked at nothing.
            let is_new = |record: &usize| anywhere != here || !iteration.has_found(*record);
            if let Some(record) = record.filter(is_new) {
                let flag = f64::from(u8::from(anywhere));
                let tensor = ffi::number_new(flag, Kind::Float, Device::Cpu)?;
                iteration.add_found(record, FoundInf { tensor, host: Some(anywhere) });
            }
            Ok(record)
        });
        match record {
            Some(record) if agreed.is_err() && iteration.stage(record) == Stage::Looked => {
                iteration.withdraw(record);
            }
            _ => {}
        }
        agreed
    }
}

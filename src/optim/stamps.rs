//! Masters of parameters that somebody else has written to.

#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use crate::ffi;
use crate::optim::{MasterWeights, Optimizer};

impl Optimizer {
    /// Brings the masters into line with parameters that were written to since the last step: all of them, or none.
    pub(crate) fn renew_masters(&mut self) -> Result<()> {
        if !self.has_masters() {
            return Ok(());
        }
        let stamps = ffi::stamps(&self.parameters)?;
        let mut stale = Vec::new();
        let (mut parameters, mut masters) = (Vec::new(), Vec::new());
        for (index, slot) in self.slots.iter().enumerate() {
            let (Some(master), Some(known)) = (&slot.state.master, slot.state.stamp) else {
                continue;
            };
            if known == stamps[index] {
                continue;
            }
            let parameter = &self.parameters[index];
            if self.masters.of(parameter, index).kind() != Some(master.f_kind()?) {
                let parameter = slot.name.clone();
                let problem = "has another dtype than when its master weight was made; build the optimizer after the \
                               model has its dtype, or cast the model back";
                return Err(Error::Parameter { parameter, problem });
            }
            stale.push(index);
            parameters.push(parameter);
            masters.push(master);
        }
        if stale.is_empty() {
            return Ok(());
        }
        ffi::masters_renew(&parameters, &masters)?;
        for index in stale {
            self.slots[index].state.stamp = Some(stamps[index]);
        }
        Ok(())
    }

    /// Notes that the parameters are what their masters say.
    pub(crate) fn stamp_masters(&mut self) -> Result<()> {
        if !self.has_masters() {
            return Ok(());
        }
        let stamps = ffi::stamps(&self.parameters)?;
        for (slot, stamp) in self.slots.iter_mut().zip(stamps) {
            slot.state.stamp = slot.state.master.is_some().then_some(stamp);
        }
        Ok(())
    }

    fn has_masters(&self) -> bool {
        matches!(self.masters, MasterWeights::Float | MasterWeights::Remainder)
            || self.slots.iter().any(|slot| slot.state.master.is_some())
    }
}

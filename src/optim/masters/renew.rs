//! Renewing the master weights of parameters that were written to from outside.

use tch::Tensor;

use crate::error::{Error, OptimizerError, Result};
use crate::ffi::{self, OutsideRegions};
use crate::optim::state::{Wanted, complete};
use crate::optim::{MasterWeights, Optimizer};

impl Optimizer {
    /// Renews the masters of parameters that were written to since the last step, or that differ from those that a
    /// loaded state belongs to: all of them, or none.
    pub(crate) fn renew_masters(&mut self) -> Result<()> {
        self.renew(|_, _| true)?;
        self.stamps.take(&self.parameters)
    }

    /// Renews only masters that have matched their parameters before. A state that was just loaded may precede its
    /// model.
    pub(crate) fn renew_known_masters(&mut self) -> Result<()> {
        self.renew(ffi::Stamps::has)
    }

    fn renew(&mut self, due: impl Fn(&ffi::Stamps, usize) -> bool) -> Result<()> {
        if !self.has_masters() {
            return Ok(());
        }
        let changed = self.stamps.compare(&self.parameters)?;
        let stale = |&index: &usize| {
            changed[index] && due(&self.stamps, index) && self.slots[index].state.master.is_some()
        };
        let stale: Vec<_> = (0..self.slots.len()).filter(stale).collect();
        if stale.is_empty() {
            return Ok(());
        }
        self.check_masters(&stale)?;
        let remainders = self.loaded_remainders(&stale)?;
        let kept = stale.iter().filter(|&&index| self.slots[index].state.loaded.is_none());
        let kept = kept.filter_map(|&index| {
            Some((&self.parameters[index], self.slots[index].state.master.as_ref()?))
        });
        let (parameters, masters): (Vec<_>, Vec<_>) = kept.unzip();
        ffi::masters_renew(&parameters, &masters)?;
        self.settle(remainders)
    }

    /// Refuses a parameter whose master is of another kind than it would have now.
    fn check_masters(&self, stale: &[usize]) -> Result<()> {
        for &index in stale {
            let (slot, parameter) = (&self.slots[index], &self.parameters[index]);
            let kind = slot.state.master.as_ref().map(Tensor::f_kind).transpose()?;
            if self.masters.of(parameter, index).kind() != kind {
                let parameter = slot.name.clone();
                let problem = "has another dtype than when its master weight was made; build the optimizer after the \
                               model has its dtype, or cast the model back";
                return Err(Error::Optimizer(OptimizerError::Parameter { parameter, problem }));
            }
        }
        Ok(())
    }

    /// The remainders of loaded masters beside their parameters, with the indices of the parameters.
    fn loaded_remainders(&self, stale: &[usize]) -> Result<Vec<(usize, Tensor)>> {
        let loaded = stale.iter().filter_map(|&index| {
            Some((index, self.slots[index].state.loaded.as_ref()?, &self.parameters[index]))
        });
        let remainders = loaded.map(|(index, loaded, parameter)| {
            Ok((index, ffi::master_remainder_of(loaded, parameter)?))
        });
        remainders.collect()
    }

    fn settle(&mut self, remainders: Vec<(usize, Tensor)>) -> Result<()> {
        let _own = OutsideRegions::enter();
        for (index, remainder) in remainders {
            let state = &mut self.slots[index].state;
            if let Some(master) = &mut state.master {
                tch::no_grad(|| master.f_copy_(&remainder))?;
            }
            state.loaded = None;
        }
        Ok(())
    }

    /// Makes the tensors that the slots at these ascending indices lack, masters included.
    pub(crate) fn complete(&mut self, wanted: &[usize]) -> Result<()> {
        let bare = |index: &usize| self.slots[*index].state.master.is_none();
        let bare: Vec<_> = wanted.iter().copied().filter(bare).collect();
        let mut wanted = wanted.iter().peekable();
        let (groups, masters) = (&self.groups, self.masters);
        let slots = self.slots.iter_mut().zip(&self.parameters).enumerate();
        let slots = slots.filter(|(index, _)| wanted.next_if_eq(&index).is_some());
        complete(slots.map(|(index, (slot, parameter))| Wanted {
            state: &mut slot.state,
            algorithm: groups[slot.group].algorithm.of(slot.is_matrix),
            parameter,
            master: masters.of(parameter, index),
        }))?;
        for index in bare {
            if self.slots[index].state.master.is_some() {
                self.stamps.take_one(index, &self.parameters[index])?;
            }
        }
        Ok(())
    }

    fn has_masters(&self) -> bool {
        matches!(self.masters, MasterWeights::Float | MasterWeights::Remainder)
            || self.slots.iter().any(|slot| slot.state.master.is_some())
    }
}

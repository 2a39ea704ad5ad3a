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
        let stale = self.stale_masters()?;
        self.check_masters(&stale)?;
        self.renew(&stale)?;
        self.stamps.take(&self.parameters)
    }

    /// Renews only masters that have matched their parameters before, which have the same dtype. A state that was just
    /// loaded may precede its model.
    pub(crate) fn renew_known_masters(&mut self) -> Result<()> {
        let mut stale = self.stale_masters()?;
        stale.retain(|&index| self.stamps.has(index) && self.fits_mode(index));
        self.renew(&stale)
    }

    /// The parameters that no longer fit their stamps, and that have masters.
    fn stale_masters(&mut self) -> Result<Vec<usize>> {
        if !self.has_masters() {
            return Ok(Vec::new());
        }
        let changed = self.stamps.compare(&self.parameters)?;
        let stale = |&index: &usize| changed[index] && self.slots[index].state.master.is_some();
        Ok((0..self.slots.len()).filter(stale).collect())
    }

    fn renew(&mut self, stale: &[usize]) -> Result<()> {
        if stale.is_empty() {
            return Ok(());
        }
        let remainders = self.loaded_remainders(stale)?;
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
        match stale.iter().find(|&&index| !self.fits_mode(index)) {
            Some(&index) => {
                let parameter = self.slots[index].name.clone();
                let problem = "has another dtype than when its master weight was made; build the optimizer after the \
                               model has its dtype and load the old `state_dict`, or cast the model back";
                Err(Error::Optimizer(OptimizerError::Parameter { parameter, problem }))
            }
            None => Ok(()),
        }
    }

    /// Whether the master of a parameter is of the kind that it would have now.
    fn fits_mode(&self, index: usize) -> bool {
        let kept = self.slots[index].state.master.as_ref().map(Tensor::kind);
        self.masters.of(&self.parameters[index], index).kind() == kept
    }

    /// Writes loaded masters to parameters that have no masters of their own, where they round to the parameters: all
    /// of them, unless the device fails. Returns the parameters.
    pub(crate) fn write_loaded_masters(&self) -> Result<Vec<usize>> {
        let _own = OutsideRegions::enter();
        let loaded = self.slots.iter().zip(&self.parameters).enumerate();
        let loaded = loaded.filter_map(|(index, (slot, parameter))| {
            let loaded = slot.state.loaded.as_ref()?;
            let has_none = self.masters.of(parameter, index).kind().is_none();
            has_none.then_some((index, parameter, loaded))
        });
        let numbers = loaded.map(|(index, parameter, loaded)| {
            Ok((index, parameter, ffi::master_numbers(loaded, parameter)?))
        });
        let numbers = numbers.collect::<Result<Vec<_>>>()?;
        let written = numbers.iter().map(|(index, parameter, numbers)| {
            tch::no_grad(|| parameter.shallow_clone().f_copy_(numbers))?;
            Ok(*index)
        });
        written.collect()
    }

    /// Makes loaded masters the numbers of the parameters that have no masters of their own.
    pub(crate) fn settle_loaded_masters(&mut self) -> Result<()> {
        for index in self.write_loaded_masters()? {
            self.slots[index].state.loaded = None;
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
        complete(slots.map(|(index, (slot, parameter))| {
            let algorithm = groups[slot.group].algorithm.of(slot.is_matrix);
            Wanted::by_step(&mut slot.state, &algorithm, parameter, masters.of(parameter, index))
        }))?;
        for index in bare {
            let state = &mut self.slots[index].state;
            if state.master.is_some() {
                state.loaded = None;
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

//! The master weights of an optimizer.
//!
//! A master is made from its parameter by the first step, and made anew where the parameter was written to since, which
//! the versions of the tensors show. In a saved state it is f32 in every mode.

use tch::{Kind, Tensor};

use crate::error::{Error, OptimizerError, ParameterProblem, Result};
use crate::ffi::{self, OutsideRegions};
use crate::optim::state::{Wanted, allocate_missing_state};
use crate::optim::{MasterWeights, Optimizer};

impl Optimizer {
    /// Returns the mode in which half-precision parameters are updated.
    pub fn master_weights(&self) -> MasterWeights {
        self.masters
    }

    /// Returns the f32 master weight of the parameter at `index`; `None` if it has none, or before its first step,
    /// which makes the master from the parameter.
    ///
    /// With [`MasterWeights::Float`] it is the optimizer's own tensor: values that are written to it are used in the
    /// next step. The exception is the time between loading a state and the next step, which makes a master anew if it
    /// does not round to its parameter. [`state_dict`](Self::state_dict) has the masters by name, as `master_param`.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if libtorch fails.
    pub fn master_weight(&self, index: usize) -> Result<Option<Tensor>> {
        let Some((slot, parameter)) = self.slots.get(index).zip(self.parameters.get(index)) else {
            return Ok(None);
        };
        let master = self.masters.of(parameter, index);
        slot.state.master_numbers(master, parameter)
    }

    /// Discards the master weights, so that the next step makes them anew from the parameters. This is not needed after
    /// parameters were written to from outside, for instance by loading them: the optimizer detects that and makes the
    /// masters of the elements that changed anew (with [`MasterWeights::Remainder`] those of the whole parameter).
    pub fn reset_master_weights(&mut self) {
        self.note_change("the master weights");
        for slot in &mut self.slots {
            (slot.state.master, slot.state.loaded) = (None, None);
        }
    }

    /// Makes autograd accumulate the gradients of half-precision parameters in f32 from now on, also over the
    /// micro-batches of a step; existing gradients are converted. Costs 4 bytes per parameter instead of 2. f32
    /// parameters are not affected. An optimizer without master weights ends it for its parameters when it is built, and
    /// by its [`zero_grad`](Self::zero_grad). Corresponds to setting `grad_dtype` of the parameters in PyTorch, and to
    /// `accumulate_allreduce_grads_in_fp32` in Megatron-LM.
    ///
    /// It is not part of a saved state: call it again after a restart. Without it, gradients are f32 from the first time
    /// that a scaler unscales them before the step, so that a first iteration with several backward passes still adds
    /// them up in half precision. That of a restored run does so, too, and its last digits differ from those of a run
    /// that was not interrupted.
    ///
    /// # Errors
    ///
    /// [`OptimizerError::NoMasterWeights`] if there are half-precision parameters but no master weights;
    /// [`Error::Torch`] if libtorch fails.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Kind, Tensor};
    /// use tch_amp::optim::{MasterWeights, Sgd};
    ///
    /// let w = Tensor::from_slice(&[1f32]).to_kind(Kind::BFloat16).set_requires_grad(true);
    /// let mut opt = Sgd::default().master_weights(MasterWeights::Float).build(&[w.shallow_clone()], 0.1)?;
    /// opt.accumulate_in_f32()?;
    /// for _ in 0..300 {
    ///     w.sum(Kind::Float).backward();
    /// }
    /// // In bf16 the sum would stay at 256.
    /// assert_eq!(w.grad().double_value(&[0]), 300.0);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn accumulate_in_f32(&mut self) -> Result<()> {
        self.take_added()?;
        let half = |w: &Tensor| matches!(w.f_kind(), Ok(Kind::Half | Kind::BFloat16));
        if self.masters == MasterWeights::None {
            let needed = self.parameters.iter().any(half);
            return if needed {
                Err(Error::Optimizer(OptimizerError::NoMasterWeights))
            } else {
                Ok(())
            };
        }
        ffi::gradients_widen(&self.parameters)?;
        self.note_change("the dtype of the gradients");
        self.f32_gradients = true;
        Ok(())
    }

    /// Renews the masters of parameters that were written to since the last step, or that differ from those that a
    /// loaded state belongs to: all of them, or none.
    pub(crate) fn refresh_masters(&mut self) -> Result<()> {
        let stale = self.stale_masters()?;
        self.check_masters(&stale)?;
        self.renew(&stale)?;
        self.stamps.take(&self.parameters)
    }

    /// Renews only masters that have matched their parameters before, which have the same dtype. A state that was just
    /// loaded may precede its model.
    pub(crate) fn refresh_stale_masters(&mut self) -> Result<()> {
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
                let problem = ParameterProblem::Cast;
                Err(Error::Optimizer(OptimizerError::Parameter { parameter, problem }))
            }
            None => Ok(()),
        }
    }

    /// Returns whether the master of a parameter is of the kind that it would have now.
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
    pub(crate) fn allocate_missing_state(&mut self, wanted: &[usize]) -> Result<()> {
        for &index in wanted {
            self.check_states(index)?;
        }
        let bare = |index: &usize| self.slots[*index].state.master.is_none();
        let bare: Vec<_> = wanted.iter().copied().filter(bare).collect();
        let mut wanted = wanted.iter().peekable();
        let (groups, masters, moments) = (&self.groups, self.masters, self.moments);
        let slots = self.slots.iter_mut().zip(&self.parameters).enumerate();
        let slots = slots.filter(|(index, _)| wanted.next_if_eq(&index).is_some());
        allocate_missing_state(slots.map(|(index, (slot, parameter))| {
            let algorithm = groups[slot.group].algorithm.of(slot.dims);
            let (kept_as, master) = (moments.of(parameter), masters.of(parameter, index));
            let parameter = (parameter, slot.dims);
            Wanted::by_step(&mut slot.state, algorithm.spec(), parameter, kept_as, master)
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

#[cfg(all(test, tamp_testing))]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use tch::Device;

    use super::*;
    use crate::optim::{Adagrad, AdamW, AdjustLr, Algorithm, Lion, Muon, RmsProp, Sgd};

    fn bits(tensor: &Tensor) -> Vec<i64> {
        let kind = if tensor.kind() == Kind::Float { Kind::Int } else { Kind::Int16 };
        let words = tensor.detach().contiguous().view_dtype(kind).to_kind(Kind::Int64).view(-1);
        Vec::try_from(words).unwrap()
    }

    /// Trains two tensors and returns their bits and those of the whole state.
    fn train(
        algorithm: Algorithm,
        kind: Kind,
        masters: MasterWeights,
        other: bool,
    ) -> Vec<Vec<i64>> {
        // Does not use tch's generator, from which other tests draw at the same time.
        let drawn = std::cell::Cell::new(0.0);
        let random = |size: &[i64]| {
            drawn.set(drawn.get() + 1.0);
            let places = Tensor::arange(size.iter().product::<i64>(), (Kind::Double, Device::Cpu));
            let wild: Tensor = (places + drawn.get()) * 12.9898;
            (wild.sin() * 43_758.545).sin().reshape(size).to_kind(kind)
        };
        let leaves = [random(&[70]), random(&[3, 5])].map(|t| t.set_requires_grad(true));
        let mut opt = algorithm.master_weights(masters).build(&leaves, 0.01).unwrap();
        ffi::testing_as_other_device(other);
        for step in 0..3 {
            opt.zero_grad().unwrap();
            for leaf in &leaves {
                (leaf * random(&leaf.size())).sum(kind).backward();
            }
            if step == 1 {
                opt.accumulate_in_f32().unwrap();
            }
            opt.step().unwrap();
        }
        ffi::testing_as_other_device(false);
        let state = opt.state_dict().unwrap().state;
        let tensors = state.values().flat_map(|tensors| tensors.values());
        leaves.iter().chain(tensors).map(bits).collect()
    }

    /// Runs the code for GPUs on CPU tensors: libtorch's own operations instead of the loops.
    #[test]
    fn other_devices_compute_the_same() {
        let algorithms: [Algorithm; 6] = [
            AdamW { amsgrad: true, ..AdamW::default() }.into(),
            Sgd { momentum: 0.9, ..Sgd::default() }.into(),
            Adagrad::default().into(),
            RmsProp { centered: true, momentum: 0.9, ..RmsProp::default() }.into(),
            Lion { weight_decay: 0.1, ..Lion::default() }.into(),
            Muon { adjust_lr_fn: AdjustLr::MatchRmsAdamW, ..Muon::default() }.into(),
        ];
        for algorithm in algorithms {
            for (kind, masters) in [
                (Kind::Half, MasterWeights::Float),
                (Kind::BFloat16, MasterWeights::Float),
                (Kind::BFloat16, MasterWeights::Remainder),
                (Kind::BFloat16, MasterWeights::StochasticRounding { seed: 9 }),
            ] {
                let here = train(algorithm, kind, masters, false);
                let there = train(algorithm, kind, masters, true);
                assert_eq!(here, there, "{algorithm:?} {kind:?} {masters:?}");
            }
        }
    }
}

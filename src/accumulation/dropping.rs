//! Leaving out the micro-batches whose gradients are not finite.

use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::ffi::{self, FoundInf, OutsideRegions, Unscaling};
use crate::gradients::{Gradients, Plan, Taken, overflow};
use crate::optim::AmpOptimizer;

/// What was left out so far.
#[derive(Debug, Default)]
pub(super) struct Kept {
    batches: Vec<Batch>,
}

/// A micro-batch: its share of the window, and for each device whether its gradients were not finite.
#[derive(Debug)]
struct Batch {
    share: f64,
    flags: Vec<FoundInf>,
}

impl Kept {
    /// Makes what a checkpoint has: the shares of the micro-batches, and which of them were left out.
    pub(super) fn resumed(batches: impl IntoIterator<Item = (f64, bool)>) -> Result<Self> {
        let batches = batches.into_iter().map(|(share, dropped)| {
            let tensor = ffi::number_new(f64::from(dropped), Kind::Float, Device::Cpu)?;
            Ok(Batch { share, flags: vec![FoundInf { tensor, host: Some(dropped) }] })
        });
        Ok(Self { batches: batches.collect::<Result<_>>()? })
    }

    /// The number of micro-batches that had a backward pass here.
    pub(super) fn batches(&self) -> usize {
        self.batches.len()
    }

    /// Runs a backward pass, and leaves its gradients out if one is not finite. On failure the gradients are as before.
    pub(super) fn backward(
        &mut self,
        optimizer: &dyn AmpOptimizer,
        share: f64,
        is_last: bool,
        backward: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let earlier = Taken::from(optimizer.parameters().into_owned())?;
        backward()?;
        let flags = found(optimizer)?;
        let batch = Batch { share, flags };
        self.add(&batch, optimizer, &earlier, is_last)?;
        earlier.settle();
        self.batches.push(batch);
        Ok(())
    }

    /// Adds the gradients of a micro-batch to the earlier ones, unless one is not finite. The earlier ones are not
    /// written to before the last call, which changes all gradients or none.
    fn add(
        &self,
        batch: &Batch,
        optimizer: &dyn AmpOptimizer,
        earlier: &Taken,
        is_last: bool,
    ) -> Result<()> {
        match overflow(&batch.flags) {
            Some(false) => {}
            // If nothing is left, the scaler has to see why.
            Some(true) if is_last && self.all_are_known_to_be(true, batch) => return Ok(()),
            Some(true) => ffi::gradients_drop(earlier.parameters())?,
            None => {
                // They are zeroed in place, and their memory may be that of a weight.
                ffi::gradients_separate(earlier.parameters())?;
                batch.clear_if_not_finite(earlier.parameters())?;
            }
        }
        earlier.add()?;
        match is_last && !self.all_are_known_to_be(false, batch) {
            true => self.reweigh(batch, optimizer),
            false => Ok(()),
        }
    }

    /// All micro-batches, of which `last` has not been recorded yet.
    fn all<'a>(&'a self, last: &'a Batch) -> impl Iterator<Item = &'a Batch> {
        self.batches.iter().chain([last])
    }

    /// Whether the host knows that all micro-batches were left out, or that none was.
    fn all_are_known_to_be(&self, dropped: bool, last: &Batch) -> bool {
        self.all(last).all(|batch| overflow(&batch.flags) == Some(dropped))
    }

    /// Divides the gradients by the share of the window that was kept. It is exactly one if nothing was left out, and
    /// zero if everything was, which makes the gradients NaN.
    fn reweigh(&self, last: &Batch, optimizer: &dyn AmpOptimizer) -> Result<()> {
        let mut gradients = gradients_of(optimizer)?;
        gradients.separate()?;
        let plan = Plan::new(&gradients, true)?;
        let _own = OutsideRegions::enter();
        let first = gradients.parameters().first();
        let device = first.map_or(Device::Cpu, Tensor::device);
        let mut total = ffi::number_new(0.0, Kind::Float, device)?;
        let mut kept = total.f_zeros_like()?;
        for Batch { share, flags } in self.all(last) {
            let share = ffi::number_new(*share, Kind::Float, device)?;
            total = total.f_add(&share)?;
            kept = kept.f_add(&share.f_mul(&any(flags, device)?.f_logical_not()?)?)?;
        }
        let scale = kept.f_div(&total)?;
        let unscaled = plan.unscale(gradients.parameters(), &scale, Unscaling::new(false, false));
        unscaled.map(drop).map_err(|interrupted| interrupted.error)
    }

    /// Whether each micro-batch was left out. Synchronizes on a GPU.
    pub(super) fn answers(&self) -> Result<Vec<bool>> {
        let _own = OutsideRegions::enter();
        let answer = |Batch { flags, .. }: &Batch| match overflow(flags) {
            Some(found) => Ok(found),
            None => Ok(any(flags, Device::Cpu)?.f_int64_value(&[])? != 0),
        };
        self.batches.iter().map(answer).collect()
    }
}

impl Batch {
    /// Replaces the gradients by zeros, where they are, if this micro-batch is not finite.
    fn clear_if_not_finite(&self, parameters: &[Tensor]) -> Result<()> {
        let _own = OutsideRegions::enter();
        for parameter in parameters {
            let mut gradient = parameter.f_grad()?;
            if gradient.defined() {
                let is_bad = any(&self.flags, gradient.device())?;
                // The host reads the number, for which it would wait if it were on the device.
                let zero = ffi::number_new(0.0, gradient.f_kind()?, Device::Cpu)?;
                let _cleared = gradient.f_masked_fill_tensor_(&is_bad, &zero)?;
            }
        }
        Ok(())
    }
}

fn gradients_of(optimizer: &dyn AmpOptimizer) -> Result<Gradients<'_>> {
    let names = Box::new(|index, _| optimizer.parameter_name(index));
    Gradients::of(optimizer.parameters(), names)
}

/// Whether any gradient is not finite, for each device.
fn found(optimizer: &dyn AmpOptimizer) -> Result<Vec<FoundInf>> {
    let gradients = gradients_of(optimizer)?;
    let plan = Plan::new(&gradients, true)?;
    let one = ffi::number_new(1.0, Kind::Float, Device::Cpu)?;
    Ok(plan.check(gradients.parameters(), &one, false)?.found)
}

/// Whether any of the flags is set, as a boolean tensor on a device.
fn any(flags: &[FoundInf], device: Device) -> Result<Tensor> {
    let _own = OutsideRegions::enter();
    let mut any = ffi::number_new(0.0, Kind::Float, device)?;
    for flag in flags {
        let flag = ffi::number_on(&flag.tensor, device, Kind::Float)?.f_view_as(&any)?;
        any = any.f_add(&flag)?;
    }
    Ok(any.f_to_kind(Kind::Bool)?)
}

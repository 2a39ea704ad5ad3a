//! Leaving out the micro-batches whose gradients are not finite.

use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::ffi::{self, FoundInf};
use crate::gradients::{Gradients, Plan, overflow};
use crate::optim::AmpOptimizer;

/// What was left out so far, and the share of the window that was not.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// For each micro-batch, whether its gradients were not finite.
    flags: Vec<Vec<FoundInf>>,
    shares: Vec<f64>,
}

impl Kept {
    /// Runs a backward pass, and leaves its gradients out if one is not finite. On failure the gradients are as before,
    /// unless the backward pass has failed midway.
    pub(super) fn backward(
        &mut self,
        optimizer: &dyn AmpOptimizer,
        share: f64,
        is_last: bool,
        backward: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let parameters = &*optimizer.parameters().into_owned();
        let earlier = ffi::gradients_take(parameters)?;
        let flags = backward().and_then(|()| found(optimizer));
        let flags = match flags {
            Ok(flags) => flags,
            Err(error) => {
                ffi::gradients_drop(parameters)?;
                ffi::gradients_add(parameters, &earlier)?;
                return Err(error);
            }
        };
        self.flags.push(flags);
        self.shares.push(share);
        let flags = &self.flags[self.flags.len() - 1];
        match overflow(flags) {
            Some(false) => {}
            // If nothing is left, the scaler has to see why.
            Some(true) if is_last && self.none_is_known_finite() => {}
            Some(true) => ffi::gradients_drop(parameters)?,
            None => clear_if_set(parameters, flags)?,
        }
        ffi::gradients_add(parameters, &earlier)?;
        if is_last { self.reweigh(parameters) } else { Ok(()) }
    }

    /// Whether the host knows that no micro-batch was finite.
    fn none_is_known_finite(&self) -> bool {
        self.flags.iter().all(|flags| overflow(flags) == Some(true))
    }

    /// Multiplies the gradients by the share of all micro-batches over that of those that were kept. It is exactly one
    /// if nothing was left out, and infinite if everything was, of which the product with zeros is NaN.
    fn reweigh(&self, parameters: &[Tensor]) -> Result<()> {
        let none_dropped = |flags: &Vec<FoundInf>| overflow(flags) == Some(false);
        if self.flags.iter().all(none_dropped) || self.none_is_known_finite() {
            return Ok(());
        }
        let gradients = ffi::gradients_take(parameters)?;
        let Some(first) = gradients.iter().flatten().next() else { return Ok(()) };
        let device = first.device();
        let all = ffi::number_new(0.0, Kind::Float, device)?;
        let mut kept = all.f_zeros_like()?;
        let mut total = all;
        for (flags, &share) in self.flags.iter().zip(&self.shares) {
            let share = ffi::number_new(share, Kind::Float, device)?;
            total = total.f_add(&share)?;
            let is_kept = any(flags, device)?.f_logical_not()?;
            kept = kept.f_add(&share.f_mul(&is_kept)?)?;
        }
        let factor = total.f_div(&kept)?;
        let multiplied = gradients.iter().map(|gradient| match gradient {
            None => Ok(None),
            Some(gradient) => {
                let kind = gradient.f_kind()?;
                let factor = ffi::number_on(&factor, gradient.device(), Kind::Float)?;
                Ok(Some(gradient.f_mul(&factor)?.f_to_kind(kind)?))
            }
        });
        let multiplied: Result<Vec<_>> = multiplied.collect();
        // Without memory for the products the gradients are put back, and the error says so.
        match multiplied {
            Ok(multiplied) => ffi::gradients_add(parameters, &multiplied),
            Err(error) => ffi::gradients_add(parameters, &gradients).and(Err(error)),
        }
    }

    pub(super) fn dropped(&self) -> Result<Vec<usize>> {
        let mut dropped = Vec::new();
        for (index, flags) in self.flags.iter().enumerate() {
            let found = match overflow(flags) {
                Some(found) => found,
                None => any(flags, Device::Cpu)?.f_int64_value(&[])? != 0,
            };
            if found {
                dropped.push(index);
            }
        }
        Ok(dropped)
    }
}

/// Whether any gradient is not finite, for each device.
fn found(optimizer: &dyn AmpOptimizer) -> Result<Vec<FoundInf>> {
    let names = Box::new(|index, _| optimizer.parameter_name(index));
    let gradients = Gradients::of(optimizer.parameters(), names)?;
    let plan = Plan::new(&gradients, true)?;
    let one = ffi::number_new(1.0, Kind::Float, Device::Cpu)?;
    Ok(plan.check(gradients.parameters(), &one)?.found)
}

/// Whether any of the flags is set, as a boolean tensor on a device.
fn any(flags: &[FoundInf], device: Device) -> Result<Tensor> {
    let mut any = ffi::number_new(0.0, Kind::Float, device)?;
    for flag in flags {
        let flag = ffi::number_on(&flag.tensor, device, Kind::Float)?.f_view_as(&any)?;
        any = any.f_add(&flag)?;
    }
    Ok(any.f_to_kind(Kind::Bool)?)
}

/// Replaces the gradients by zeros if a flag is set, where the flags are.
fn clear_if_set(parameters: &[Tensor], flags: &[FoundInf]) -> Result<()> {
    let gradients = ffi::gradients_take(parameters)?;
    let cleared = gradients.iter().map(|gradient| match gradient {
        None => Ok(None),
        Some(gradient) => {
            let zeros = gradient.f_zeros_like()?;
            Ok(Some(zeros.f_where_self(&any(flags, gradient.device())?, gradient)?))
        }
    });
    let cleared: Result<Vec<_>> = cleared.collect();
    match cleared {
        Ok(cleared) => ffi::gradients_add(parameters, &cleared),
        Err(error) => ffi::gradients_add(parameters, &gradients).and(Err(error)),
    }
}

//! Selecting the gradients of an optimizer, and then checking them for infinities and NaNs, unscaling them, or taking
//! their norm. All are inspected before any is changed.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use tch::{Device, Kind, Tensor};

use crate::error::{Error, GradientError, GradientProblem, Result};
use crate::ffi::{self, DeviceCode, FoundInf, Gradient, Interrupted, Unscaling};
use crate::gradients::Gradients;

/// How the gradients of an optimizer are prepared for its step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Preparation {
    /// They are unscaled in place.
    Unscale,
    /// They stay scaled, for an optimizer that unscales them.
    Check,
    /// Like `Check`, and their norm of this type is taken.
    Norm(f64),
}

/// The result of a check.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    pub(crate) found: Vec<FoundInf>,
    /// The norm of the unscaled gradients, if it was taken.
    pub(crate) norm: Option<Tensor>,
}

/// The gradients of one optimizer, sorted by what is done with them.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// Indices of the parameters whose gradients are to be unscaled, by device.
    pub(crate) groups: Vec<(DeviceCode, Vec<usize>)>,
}

/// Drops the gradients that frozen parameters still have, which no optimizer may apply. `now` describes the gradients.
pub(crate) fn drop_frozen(parameters: &[Tensor], now: &[Gradient]) -> Result<()> {
    let both = now.iter().zip(parameters);
    let frozen = both.filter(|(gradient, _)| gradient.exists() && gradient.is_frozen());
    let frozen: Vec<_> = frozen.map(|(_, parameter)| parameter).collect();
    if frozen.is_empty() { Ok(()) } else { ffi::gradients_drop(frozen) }
}

impl Plan {
    /// Sorts the gradients, or returns an error that names the first that cannot be unscaled.
    pub(crate) fn new(gradients: &Gradients<'_>, allow_fp16: bool) -> Result<Self> {
        let mut plan = Self::default();
        let mut seen = IdentityMap::default();
        for (index, gradient) in gradients.snapshot().iter().enumerate() {
            let refuse = |problem| {
                Error::Gradient(GradientError::Unsupported {
                    parameter: gradients.describe(index),
                    problem,
                })
            };
            if gradient.parameter() == 0 {
                return Err(refuse(GradientProblem::UndefinedParameter));
            }
            // A parameter in two groups is unscaled once.
            if !gradient.is_used() || seen.insert(gradient.parameter(), ()).is_some() {
                continue;
            }
            if let Some(problem) = problem(gradient, allow_fp16) {
                return Err(refuse(problem));
            }
            plan.add(gradient.device(), index);
        }
        Ok(plan)
    }

    pub(crate) fn add(&mut self, device: DeviceCode, index: usize) {
        match self.groups.iter_mut().find(|(known, _)| *known == device) {
            Some((_, indices)) => indices.push(index),
            None => self.groups.push((device, vec![index])),
        }
    }
}

impl Gradients<'_> {
    /// Returns an error that names the first gradient with a problem, of those that `which` selects.
    pub(crate) fn refuse(
        &self,
        which: fn(&Gradient) -> bool,
        problem: fn(&Gradient) -> Option<GradientProblem>,
    ) -> Result<()> {
        for (index, gradient) in self.snapshot().iter().enumerate() {
            if let Some(problem) = problem(gradient).filter(|_| which(gradient)) {
                let parameter = self.describe(index);
                return Err(Error::Gradient(GradientError::Unsupported { parameter, problem }));
            }
        }
        Ok(())
    }
}

fn problem(gradient: &Gradient, allow_fp16: bool) -> Option<GradientProblem> {
    let refused = gradient.is_fp16() && !allow_fp16;
    if refused { Some(GradientProblem::Fp16) } else { uncountable(gradient) }
}

/// Returns the problem of a gradient whose values are to be read, if there is one.
pub(crate) fn uncountable(gradient: &Gradient) -> Option<GradientProblem> {
    if !gradient.is_floating_or_complex() {
        return Some(GradientProblem::Dtype);
    }
    (!gradient.is_strided() && !gradient.is_sparse()).then_some(GradientProblem::Layout)
}

impl Plan {
    /// Unscales the gradients of all groups, in one call.
    pub(crate) fn unscale(
        &self,
        parameters: &[Tensor],
        scale: &Tensor,
        unscaling: Unscaling,
    ) -> std::result::Result<Vec<FoundInf>, Interrupted> {
        let all = self.groups.iter().flat_map(|(_, indices)| indices).map(|&i| &parameters[i]);
        ffi::gradients_unscale(all, scale, self.groups.len(), unscaling)
    }

    /// Checks the gradients and leaves them unchanged; with `recheck` also whether unscaling would make one infinite.
    pub(crate) fn check(
        &self,
        parameters: &[Tensor],
        scale: &Tensor,
        recheck: bool,
    ) -> Result<Findings> {
        let found = self.unscale(parameters, scale, Unscaling::new(true, recheck));
        let found = found.map_err(|interrupted| interrupted.error)?;
        Ok(Findings { found, norm: None })
    }

    /// Takes a norm of the gradients divided by the scale that they have, if any, over all groups, and leaves them
    /// unchanged.
    pub(crate) fn norm(
        &self,
        parameters: &[Tensor],
        norm_type: f64,
        scale: Option<&Tensor>,
    ) -> Result<Findings> {
        let norm_of = |(_, indices): &(_, Vec<usize>)| {
            ffi::gradients_norm(indices.iter().map(|&i| &parameters[i]), norm_type, scale)
        };
        let norms: Result<Vec<_>> = self.groups.iter().map(norm_of).collect();
        let (norms, found): (Vec<_>, _) = norms?.into_iter().unzip();
        Ok(Findings { found, norm: Some(common_norm(&norms, norm_type)?) })
    }

    /// Clips the gradients, whose total norm is `norm`, and each of which has memory of its own.
    pub(crate) fn clip(&self, parameters: &[Tensor], norm: &Tensor, max_norm: f64) -> Result<()> {
        let all = self.groups.iter().flat_map(|(_, indices)| indices);
        ffi::clip_by_norm(all.map(|&index| &parameters[index]), norm, max_norm)
    }
}

/// The norm of several norms, on the device of the first.
fn common_norm(norms: &[Tensor], norm_type: f64) -> Result<Tensor> {
    match norms {
        [] => ffi::number_new(0.0, Kind::Float, Device::Cpu),
        _ => ffi::norms_join(norms, norm_type),
    }
}

/// Returns whether any of the flags is set; `None` if the host does not have the answer.
pub(crate) fn overflow<'a>(found: impl IntoIterator<Item = &'a FoundInf>) -> Option<bool> {
    let mut known = Some(false);
    for flag in found {
        match flag.host {
            Some(true) => return Some(true),
            Some(false) => {}
            None => known = None,
        }
    }
    known
}

/// A map from tensor identities.
pub(crate) type IdentityMap<T> = HashMap<usize, T, BuildHasherDefault<IdentityHasher>>;

/// Hashes identities, which are addresses and need no protection against an attacker.
#[derive(Debug, Default)]
pub(crate) struct IdentityHasher(u64);

impl Hasher for IdentityHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_usize(byte.into());
        }
    }

    fn write_usize(&mut self, address: usize) {
        // Fibonacci hashing (Knuth): the golden ratio spreads the multiples of an alignment.
        self.0 = (self.0 ^ address as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32);
    }
}

//! Checking gradients for infinities and NaNs, and taking their norm. Unscaling checks them as well.

use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::ffi::{self, FoundInf, Interrupted, Unscaling};
use crate::gradients::Plan;

/// How the gradients of an optimizer are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// They are unscaled in place.
    Unscale,
    /// They stay scaled, for an optimizer that unscales them.
    Check,
    /// Like `Check`, and their norm is taken.
    Norm,
}

/// The result of a check.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    pub(crate) found: Vec<FoundInf>,
    /// The norm of the unscaled gradients, if it was taken.
    pub(crate) norm: Option<Tensor>,
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

    /// Takes the norm of the gradients divided by the scale that they have, if any, over all groups, and leaves them
    /// unchanged.
    pub(crate) fn norm(&self, parameters: &[Tensor], scale: Option<&Tensor>) -> Result<Findings> {
        let norm_of = |(_, indices): &(_, Vec<usize>)| {
            ffi::gradients_norm(indices.iter().map(|&i| &parameters[i]), scale)
        };
        let norms: Result<Vec<_>> = self.groups.iter().map(norm_of).collect();
        let (norms, found): (Vec<_>, _) = norms?.into_iter().unzip();
        Ok(Findings { found, norm: Some(common_norm(&norms)?) })
    }

    /// Clips the gradients, whose total norm is `norm`, and each of which has memory of its own.
    pub(crate) fn clip(&self, parameters: &[Tensor], norm: &Tensor, max_norm: f64) -> Result<()> {
        let all = self.groups.iter().flat_map(|(_, indices)| indices);
        ffi::clip_by_norm(all.map(|&index| &parameters[index]), norm, max_norm)
    }
}

/// The norm of several norms, on the device of the first.
fn common_norm(norms: &[Tensor]) -> Result<Tensor> {
    match norms {
        [] => ffi::number_new(0.0, Kind::Float, Device::Cpu),
        _ => ffi::norms_join(norms),
    }
}

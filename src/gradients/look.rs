//! Looking at gradients: whether one is infinite or NaN, and what their norm is. Unscaling is a look that changes them.

use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::ffi::{self, Interrupted, Unscaling};
use crate::gradients::{FoundInf, Plan, Spare};

/// How the gradients of an optimizer are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// They are unscaled in place.
    Unscale,
    /// They are left scaled, for an optimizer that unscales them.
    Check,
    /// As `Check`, and their norm is taken.
    Norm,
}

/// What a look has found.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    pub(crate) found: Vec<FoundInf>,
    /// The norm of the unscaled gradients, where it was taken.
    pub(crate) norm: Option<Tensor>,
}

impl Plan {
    /// Runs the kernels over all groups, in one call.
    pub(crate) fn unscale(
        &self,
        parameters: &[Tensor],
        scale: &Tensor,
        unscaling: Unscaling,
        spare: &mut Spare,
    ) -> std::result::Result<Findings, Interrupted> {
        let firsts = self.groups.iter().map(|(_, indices)| &parameters[indices[0]]);
        let tensors: Result<Vec<_>> = firsts.map(|first| spare.take(first)).collect();
        let tensors = tensors.map_err(|error| Interrupted { error, begun: false })?;
        let all = self.groups.iter().flat_map(|(_, indices)| indices).map(|&i| &parameters[i]);
        let answers = ffi::gradients_unscale(all, scale, &tensors, unscaling)?;
        let found = tensors.into_iter().zip(answers);
        let found = found.map(|(tensor, host)| FoundInf { tensor, host, lent: false }).collect();
        Ok(Findings { found, norm: None })
    }

    /// Looks at the gradients and leaves them as they are.
    pub(crate) fn check(
        &self,
        parameters: &[Tensor],
        scale: &Tensor,
        spare: &mut Spare,
    ) -> Result<Findings> {
        let found = self.unscale(parameters, scale, Unscaling::CHECK_ONLY, spare);
        found.map_err(|interrupted| interrupted.error)
    }

    /// Takes the norm of what unscaling would make of the gradients, over all groups, and leaves them as they are.
    pub(crate) fn norm(
        &self,
        parameters: &[Tensor],
        scale: &Tensor,
        spare: &mut Spare,
    ) -> Result<Findings> {
        let (mut found, mut norms) = (Vec::new(), Vec::new());
        for (_, indices) in &self.groups {
            let group: Vec<&Tensor> = indices.iter().map(|&i| &parameters[i]).collect();
            let tensor = spare.take(group[0])?;
            let (norm, host) = ffi::gradients_norm(&group, scale, &tensor)?;
            found.push(FoundInf { tensor, host, lent: false });
            norms.push(norm);
        }
        Ok(Findings { found, norm: Some(common_norm(norms)?) })
    }
}

/// The norm of several norms, on the device of the first.
fn common_norm(mut norms: Vec<Tensor>) -> Result<Tensor> {
    if norms.len() == 1 {
        return Ok(norms.swap_remove(0));
    }
    let device = norms.first().map_or(Device::Cpu, Tensor::device);
    // On the CPU in f64: a norm too large for f32 is no infinite one. Other devices may have no f64.
    let kind = if device == Device::Cpu { Kind::Double } else { Kind::Float };
    let norms: Vec<_> = norms.iter().map(|norm| to(norm, device, kind)).collect::<Result<_>>()?;
    let norm = Tensor::f_stack(&norms, 0)?.f_norm()?;
    if kind == Kind::Double {
        let value = norm.f_double_value(&[])?;
        let fits = !value.is_finite() || (value as f32).is_finite();
        return if fits { Ok(norm.f_to_kind(Kind::Float)?) } else { Ok(norm) };
    }
    Ok(norm)
}

/// A number on a device. A copy to the host that was not waited for could be read before it is there.
fn to(number: &Tensor, device: Device, kind: Kind) -> Result<Tensor> {
    Ok(number.f_to_device_(device, kind, device != Device::Cpu, false)?)
}

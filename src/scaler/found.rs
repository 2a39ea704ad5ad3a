//! What is known of infinities and NaNs in gradients, and where.

#![forbid(unsafe_code)]

use tch::{Device, Kind, Tensor};

use crate::error::Result;

/// Whether the gradients of one device held an infinity or a NaN.
#[derive(Debug)]
pub(crate) struct FoundInf {
    pub(crate) tensor: Tensor,
    /// The answer, where the host has it.
    pub(crate) host: Option<bool>,
    /// Whether somebody else reads the tensor later, so that it must not be used again.
    pub(crate) lent: bool,
}

impl FoundInf {
    /// The same answer for another record, which must not use the tensor again.
    pub(crate) fn lend(&self) -> Self {
        Self { tensor: self.tensor.shallow_clone(), host: self.host, lent: true }
    }
}

/// Whether a step can be taken.
#[derive(Debug)]
pub(crate) enum Verdict {
    Known(bool),
    /// Not if this flag, on a device, is not zero.
    Unless(Tensor),
}

/// Keeps the tensors that nobody else reads.
pub(crate) fn recycle(spare: &mut Vec<Tensor>, found: impl IntoIterator<Item = FoundInf>) {
    spare.extend(found.into_iter().filter(|flag| !flag.lent).map(|flag| flag.tensor));
}

/// The norm of several norms, on the device of the first.
pub(crate) fn common_norm(mut norms: Vec<Tensor>) -> Result<Tensor> {
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

/// A number on a device. A copy to the host that nobody waited for could be read before it is there.
fn to(number: &Tensor, device: Device, kind: Kind) -> Result<Tensor> {
    Ok(number.f_to_device_(device, kind, device != Device::Cpu, false)?)
}

pub(crate) fn tensors(found: &[FoundInf]) -> Vec<&Tensor> {
    found.iter().map(|flag| &flag.tensor).collect()
}

/// The sum of the flags, where the host knows it.
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

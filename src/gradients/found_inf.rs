//! What is known of infinities and NaNs in gradients, and where.

use tch::{Kind, Tensor};

use crate::error::Result;
use crate::ffi;

/// Whether the gradients of one device held an infinity or a NaN.
#[derive(Debug)]
pub(crate) struct FoundInf {
    pub(crate) tensor: Tensor,
    /// The answer, where the host has it.
    pub(crate) host: Option<bool>,
    /// Whether the tensor is read elsewhere later, so that it must not be used again.
    pub(crate) lent: bool,
}

impl FoundInf {
    /// The same answer for another record, which must not use the tensor again.
    pub(crate) fn lend(&self) -> Self {
        Self { tensor: self.tensor.shallow_clone(), host: self.host, lent: true }
    }
}

/// found_inf tensors of earlier iterations, to be used again.
#[derive(Debug, Default)]
pub(crate) struct Spare(Vec<Tensor>);

impl Spare {
    /// A found_inf tensor on the device of a parameter.
    pub(crate) fn take(&mut self, parameter: &Tensor) -> Result<Tensor> {
        let device = parameter.device();
        match self.0.iter().position(|tensor| tensor.device() == device) {
            Some(index) => Ok(self.0.swap_remove(index)),
            None => ffi::number_new(0.0, Kind::Float, device),
        }
    }

    /// Keeps the tensors that are not read elsewhere.
    pub(crate) fn recycle(&mut self, found: impl IntoIterator<Item = FoundInf>) {
        self.0.extend(found.into_iter().filter(|flag| !flag.lent).map(|flag| flag.tensor));
    }
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

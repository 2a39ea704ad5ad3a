//! The transaction between unscaling and stepping.

#![forbid(unsafe_code)]

use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::ffi;
use crate::optim::AmpOptimizer;
use crate::scaler::{GradScaler, StepOutcome};

/// An optimizer whose gradients have been unscaled: clip them, then step. Dropping it leaves the step out.
///
/// It borrows both sides, so that clipping before unscaling, unscaling twice and stepping twice do not compile:
///
/// ```compile_fail,E0382
/// # fn twice(scaler: &tch_amp::GradScaler, opt: &mut tch::nn::Optimizer) -> tch_amp::Result<()> {
/// let unscaled = scaler.unscale(opt)?;
/// let _first = unscaled.step()?;
/// let _second = unscaled.step()?;
/// # Ok(()) }
/// ```
///
/// ```compile_fail,E0499
/// # fn twice(scaler: &tch_amp::GradScaler, opt: &mut tch::nn::Optimizer) -> tch_amp::Result<()> {
/// let first = scaler.unscale(opt)?;
/// let second = scaler.unscale(opt)?;
/// let _outcome = first.step()?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
#[must_use = "dropping this leaves the optimizer's step out; call `step`"]
pub struct Unscaled<'a, O: AmpOptimizer> {
    scaler: &'a GradScaler,
    optimizer: &'a mut O,
    /// `None` when the scaler is disabled or the optimizer has no parameters.
    record: Option<usize>,
}

impl<'a, O: AmpOptimizer> Unscaled<'a, O> {
    pub(crate) fn new(scaler: &'a GradScaler, optimizer: &'a mut O, record: Option<usize>) -> Self {
        Self {
            scaler,
            optimizer,
            record,
        }
    }

    /// Scales the gradients down in place so that their common 2-norm is at most `max_norm`, and returns the norm from
    /// before: a 0-dim tensor on the device of the first gradient; zero without any. Waits for the device only where
    /// gradients on a GPU and on the CPU meet. As `torch.nn.utils.clip_grad_norm_`.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`](crate::Error::Torch) for sparse gradients, whose norm libtorch cannot take.
    pub fn clip_grad_norm(&mut self, max_norm: f64) -> Result<Tensor> {
        let norm = self.change(|parameters| ffi::clip_grad_norm(parameters, max_norm))?;
        norm.map_or_else(|| Ok(Tensor::f_zeros([], (Kind::Float, Device::Cpu))?), Ok)
    }

    /// Clamps every element of the gradients to `-max..=max`, in place. As `torch.nn.utils.clip_grad_value_`.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`](crate::Error::Torch) for sparse or complex gradients, which libtorch cannot clamp.
    pub fn clip_grad_value(&mut self, max: f64) -> Result<()> {
        self.change(|parameters| ffi::clip_grad_value(parameters, max))
    }

    /// Changes the gradients and remembers that it was us.
    fn change<T>(&mut self, change: impl FnOnce(&[Tensor]) -> Result<T>) -> Result<T> {
        let parameters = self.optimizer.parameters();
        let out = change(&parameters)?;
        if let Some(record) = self.record {
            let now = ffi::gradients_inspect(&parameters)?;
            self.scaler.iteration.borrow_mut().accept(record, now);
        }
        Ok(out)
    }

    /// Steps the optimizer if all its gradients are finite. Waits as [`GradScaler::step`].
    ///
    /// # Errors
    ///
    /// As [`GradScaler::step`].
    pub fn step(self) -> Result<StepOutcome> {
        self.scaler.step_shared(self.optimizer)
    }
}

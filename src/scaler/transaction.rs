//! The transaction between unscaling and stepping, and the changes of unscaled gradients.

use tch::{Device, Kind, Tensor};

use crate::error::{Error, GradientChange, GradientError, Result};
use crate::ffi::{Gradient, Snapshot};
use crate::gradients::{ClipNorm, Plan, check_limit, clamp, reduce_norm, unclippable};
use crate::optim::AmpOptimizer;
use crate::scaler::iteration::RecordId;
use crate::scaler::{GradScaler, StepOutcome};

/// An optimizer whose gradients have been unscaled: clip them, then step. Dropping it omits the step. PyTorch has no
/// counterpart.
///
/// It borrows the scaler and the optimizer, so that clipping before unscaling, unscaling twice and stepping twice do
/// not compile:
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
/// first.step()?;
/// # Ok(()) }
/// ```
#[must_use = "dropping this omits the optimizer's step; call `step`"]
pub struct Unscaled<'a> {
    scaler: &'a GradScaler,
    optimizer: &'a mut dyn AmpOptimizer,
    /// `None` if the scaler is disabled or there was no gradient.
    record: Option<RecordId>,
}

impl<'a> Unscaled<'a> {
    pub(crate) fn new(
        scaler: &'a GradScaler,
        optimizer: &'a mut dyn AmpOptimizer,
        record: Option<RecordId>,
    ) -> Self {
        Self { scaler, optimizer, record }
    }

    /// Scales the gradients down in place so that their common norm is at most `clip`, such as a number for the 2-norm,
    /// and returns the norm before clipping: a 0-dim tensor on the device of the first gradient, or zero if there are
    /// no gradients. A norm that is not finite counts as an infinite gradient, as in [`GradScaler::step_clip_norm`]:
    /// the step is skipped. Synchronizes only where gradients on a GPU and on the CPU are clipped together, and with
    /// [`error_if_nonfinite`](ClipNorm::error_if_nonfinite). The counterpart of `torch.nn.utils.clip_grad_norm_`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for a negative or NaN limit and for a type of norm that is not more than 0;
    /// [`GradientError::Changed`] as in [`GradScaler::step`]; [`GradientError::Unsupported`] for a sparse gradient;
    /// [`GradientError::NonFiniteNorm`], which leaves the gradients unchanged, with `error_if_nonfinite`.
    pub fn clip_grad_norm(&mut self, clip: impl Into<ClipNorm>) -> Result<Tensor> {
        let clip = clip.into().checked()?;
        let norm = match clip.error_if_nonfinite {
            true => self.change(false, |all| reduce_norm(all, clip))?,
            false => self.scaler.clip_unscaled(self.record, &*self.optimizer, clip, false)?,
        };
        or_zero(norm)
    }

    /// Clamps every element of the gradients to `-max..=max`, in place. The counterpart of
    /// `torch.nn.utils.clip_grad_value_`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for a negative or NaN limit; [`GradientError::Changed`] as in [`GradScaler::step`];
    /// [`GradientError::Unsupported`] for a sparse or complex gradient.
    pub fn clip_grad_value(&mut self, max: f64) -> Result<()> {
        check_limit("max", max)?;
        self.change(false, |all| clamp(all, max))
    }

    fn change<T>(
        &mut self,
        recheck: bool,
        change: impl FnOnce(&[Tensor]) -> Result<T>,
    ) -> Result<T> {
        let (record, optimizer) = (self.record, &*self.optimizer);
        self.scaler.change_gradients(record, optimizer, recheck, change)
    }

    /// Steps the optimizer if all its gradients are finite. Synchronizes like [`GradScaler::step`].
    ///
    /// # Errors
    ///
    /// The same as [`GradScaler::step`].
    pub fn step(self) -> Result<StepOutcome> {
        self.scaler.step_shared(self.optimizer)
    }
}

impl GradScaler {
    /// Changes the gradients of an unscaled optimizer and records that the change was the scaler's own. `recheck` if
    /// it can make one non-finite.
    pub(crate) fn change_gradients<T>(
        &self,
        record: Option<RecordId>,
        optimizer: &dyn AmpOptimizer,
        recheck: bool,
        change: impl FnOnce(&[Tensor]) -> Result<T>,
    ) -> Result<T> {
        let gradients = self.gradients(optimizer)?;
        let Some(record) = record else {
            let mut now = gradients.snapshot().iter();
            return match now.position(|gradient| gradient.exists() && self.is_enabled()) {
                Some(index) => Err(appeared(gradients.describe(index))),
                None => change(gradients.parameters()),
            };
        };
        let record = &mut self.iteration()?[record];
        record.compare(&gradients)?;
        gradients.drop_frozen()?;
        let changed = change(gradients.parameters())?;
        record.accept_own_change(Snapshot::of(gradients.parameters())?, recheck);
        Ok(changed)
    }

    /// Clips the unscaled gradients of a record and returns their norm. A norm that is not finite counts as an infinite
    /// gradient, since clipping by it would make all gradients zero. With `reads`, the host asks the devices for their
    /// answers before the gradients change: that can fail, and a retry would clip them again.
    pub(super) fn clip_unscaled(
        &self,
        record: Option<RecordId>,
        optimizer: &dyn AmpOptimizer,
        clip: ClipNorm,
        reads: bool,
    ) -> Result<Option<Tensor>> {
        let recheck = !clip.max_norm.is_finite();
        let Some(record) = record else {
            let reduce = |parameters: &[Tensor]| reduce_norm(parameters, clip);
            return self.change_gradients(None, optimizer, recheck, reduce);
        };
        let gradients = self.gradients(optimizer)?;
        let record = &mut self.iteration()?[record];
        record.compare(&gradients)?;
        gradients.drop_frozen()?;
        gradients.refuse(Gradient::is_used, unclippable)?;
        let plan = Plan::new(&gradients, true)?;
        let findings = plan.norm(gradients.parameters(), clip.norm_type, None)?;
        let Some(norm) = findings.norm.filter(|_| !findings.found.is_empty()) else {
            return Ok(None);
        };
        record.found.extend(findings.found);
        if reads {
            record.found_inf()?;
        }
        plan.clip(gradients.parameters(), &norm, clip.max_norm)?;
        record.accept_own_change(Snapshot::of(gradients.parameters())?, recheck);
        Ok(Some(norm))
    }
}

fn appeared(parameter: String) -> Error {
    let how = GradientChange::Appeared;
    Error::Gradient(GradientError::Changed { parameter, how })
}

/// The norm, or that of no gradients.
fn or_zero(norm: Option<Tensor>) -> Result<Tensor> {
    norm.map_or_else(|| Ok(Tensor::f_zeros([], (Kind::Float, Device::Cpu))?), Ok)
}

impl std::fmt::Debug for Unscaled<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Unscaled").finish_non_exhaustive()
    }
}

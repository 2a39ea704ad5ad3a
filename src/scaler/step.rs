//! Unscaling and stepping an optimizer.

use tch::Tensor;

use crate::autocast;
#[cfg(doc)]
use crate::error::GradientError;
use crate::error::{Error, Result, ScalerError};
use crate::ffi;
use crate::gradients::Look;
use crate::optim::{AmpOptimizer, Step};
use crate::scale::Number;
use crate::scaler::iteration::Verdict;
use crate::scaler::outcome::Taken;
use crate::scaler::record::Stage;
use crate::scaler::{GradScaler, SpikeDetector, StepOutcome, Unscaled};

/// Fails unless a step is the next call that is due.
pub(crate) fn due(stage: Stage) -> Result<()> {
    match stage {
        Stage::Broken => Err(Error::Scaler(ScalerError::UnscaleFailed)),
        Stage::Looked | Stage::Stepped => Err(Error::Scaler(ScalerError::AlreadyStepped)),
        Stage::Unscaled => Ok(()),
    }
}

pub(super) fn update(optimizer: &mut dyn AmpOptimizer, step: &Step<'_>) -> Result<()> {
    autocast::forgetting_casts(|| optimizer.update(step))
}

impl GradScaler {
    /// Divides the gradients of an optimizer's parameters by the scale, in place, and records whether any is infinite
    /// or NaN. The counterpart of `unscale_`; [`unscale`](Self::unscale) also returns a transaction. Synchronizes only
    /// where gradients on the CPU meet a scale on a GPU.
    ///
    /// Only needed to inspect or change gradients before [`step`](Self::step), which otherwise unscales them itself.
    /// Gradients may be f32, f64, bf16 or complex (fp16 with
    /// [`allow_fp16_gradients`](crate::scaler::GradScalerConfig::allow_fp16_gradients)), dense in any memory format or
    /// COO sparse, and on several devices. Parameters without a gradient are ignored, and a gradient that a frozen
    /// parameter still has is dropped. Clip before the next loss is scaled. Synchronizes like [`step`](Self::step) for
    /// gradients that were zeroed in place after a step.
    ///
    /// # Errors
    ///
    /// [`ScalerError::AlreadyUnscaled`], [`ScalerError::UnscaleAfterStep`], [`GradientError::Shared`] and
    /// [`GradientError::Unsupported`]; no gradient is changed then. [`Error::Torch`] if libtorch fails. If memory ran
    /// out, all gradients are as before and the call can be repeated; if libtorch failed midway, later calls return
    /// [`ScalerError::UnscaleFailed`].
    pub fn unscale_(&mut self, optimizer: &mut dyn AmpOptimizer) -> Result<()> {
        self.open(optimizer)?;
        Ok(())
    }

    /// Unscales in place like [`unscale_`](Self::unscale_) and returns a transaction that clips and steps. It borrows
    /// the scaler shared, so that several optimizers can be in transactions at once. PyTorch has no counterpart.
    ///
    /// # Errors
    ///
    /// The same as [`unscale_`](Self::unscale_).
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Tensor};
    /// use tch_amp::GradScaler;
    /// use tch_amp::optim::Sgd;
    ///
    /// # let w = Tensor::from_slice(&[1f32, 1.0]).set_requires_grad(true);
    /// # let mut opt = Sgd::default().build(&[w.shallow_clone()], 0.5)?;
    /// # let mut scaler = GradScaler::new(Device::Cpu)?;
    /// scaler.backward(&(&w * Tensor::from_slice(&[3f32, 0.5])).sum(None))?;
    /// let mut unscaled = scaler.unscale(&mut opt)?;
    /// unscaled.clip_grad_value(1.0)?;
    /// assert!(unscaled.step()?.is_stepped()?);
    /// scaler.update()?;
    /// assert_eq!(Vec::<f64>::try_from(&w)?, [0.5, 0.75]);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn unscale<'a>(&'a self, optimizer: &'a mut dyn AmpOptimizer) -> Result<Unscaled<'a>> {
        let record = self.open(optimizer)?;
        Ok(Unscaled::new(self, optimizer, record))
    }

    /// Steps the optimizer if all its gradients are finite, and unscales them first unless that was done. The
    /// counterpart of `step`.
    ///
    /// A fused [`Optimizer`](crate::optim::Optimizer) unscales and skips on the device, without synchronizing; its
    /// gradients stay scaled, unless libtorch's kernel for the device writes them back. For a host optimizer with
    /// gradients on GPUs, the call synchronizes: the flags for non-finite gradients of all parameters and devices are
    /// read in one transfer. Gradients whose values changed since `unscale_`, for instance by clipping, are checked
    /// again. Gradients that a backward has made since the last step are new, also for the same parameters. After a step
    /// the autocast weight cache is cleared. If optimizers share gradients on a GPU that were zeroed in place after a
    /// step in the same iteration, the call synchronizes to learn that nothing is left of them.
    ///
    /// # Errors
    ///
    /// [`ScalerError::AlreadyStepped`] for gradients that a step since the last `update` has used;
    /// [`GradientError::Changed`] if a gradient is not the one that was unscaled,
    /// because it appeared, was replaced, or changed after another loss was scaled; the errors of
    /// [`unscale_`](Self::unscale_); and any error of the optimizer's own step.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Tensor};
    /// use tch_amp::GradScaler;
    /// use tch_amp::optim::Sgd;
    ///
    /// let w = Tensor::from_slice(&[1f32]).set_requires_grad(true);
    /// let mut opt = Sgd::default().build(&[w.shallow_clone()], 0.25)?;
    /// let mut scaler = GradScaler::new(Device::Cpu)?;
    /// scaler.backward(&(&w * f64::INFINITY).sum(None))?;
    /// assert!(scaler.step(&mut opt)?.is_skipped()?);
    /// scaler.update()?;
    /// assert_eq!((w.double_value(&[0]), scaler.get_scale()?), (1.0, 32768.0));
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn step(&mut self, optimizer: &mut dyn AmpOptimizer) -> Result<StepOutcome> {
        self.step_shared(optimizer)
    }

    pub(crate) fn step_shared(&self, optimizer: &mut dyn AmpOptimizer) -> Result<StepOutcome> {
        let Some(scale) = self.scale.number() else {
            self.check_synced(optimizer)?;
            update(optimizer, &Step::default())?;
            return Ok(StepOutcome::known(Taken::Stepped));
        };
        if optimizer.takes_scaled_gradients() {
            return self.step_scaled(optimizer, scale, None, None);
        }
        match self.claim_for_step(optimizer, Look::Unscale)? {
            Some(record) => self.step_unscaled(record, optimizer),
            None => Ok(StepOutcome::known(Taken::NoGradients)),
        }
    }

    /// Takes the step if the record allows it. Synchronizes to find out whether it does.
    fn step_unscaled(
        &self,
        record: usize,
        optimizer: &mut dyn AmpOptimizer,
    ) -> Result<StepOutcome> {
        let found_inf = self.iteration.borrow_mut().found_inf(record)?;
        let taken = if found_inf {
            Taken::Skipped
        } else {
            // The iteration is not borrowed meanwhile: the optimizer may use the scaler.
            update(optimizer, &Step::default())?;
            Taken::Stepped
        };
        self.iteration.borrow_mut().set_stepped(record);
        Ok(StepOutcome::known(taken))
    }

    /// Steps an optimizer that unscales and skips by itself, clipping to `max_norm` if there is one. Does not
    /// synchronize.
    pub(crate) fn step_scaled(
        &self,
        optimizer: &mut dyn AmpOptimizer,
        scale: &Number,
        max_norm: Option<f64>,
        spikes: Option<&mut SpikeDetector>,
    ) -> Result<StepOutcome> {
        let look = if max_norm.is_some() { Look::Norm } else { Look::Check };
        let Some(record) = self.claim_for_step(optimizer, look)? else {
            return Ok(StepOutcome::known(Taken::NoGradients));
        };
        let scaled = self.iteration.borrow().stage(record) == Stage::Looked;
        let grad_scale = scaled.then(|| scale.tensor());
        let outcome = self.update_scaled(record, optimizer, grad_scale, max_norm, spikes);
        let mut iteration = self.iteration.borrow_mut();
        match outcome {
            Ok(_) => iteration.set_stepped(record),
            // If nothing was changed, the step can be tried again. On a GPU the kernels may have unscaled some of the
            // gradients.
            Err(_) if scaled && iteration.is_untouched(record) => iteration.withdraw(record),
            Err(_) if scaled => iteration.set_broken(record),
            Err(_) => {}
        }
        outcome
    }

    /// Lets the optimizer take its step, unless the host knows that it is skipped.
    fn update_scaled(
        &self,
        record: usize,
        optimizer: &mut dyn AmpOptimizer,
        grad_scale: Option<&Tensor>,
        max_norm: Option<f64>,
        spikes: Option<&mut SpikeDetector>,
    ) -> Result<StepOutcome> {
        let (verdict, norm) = {
            let iteration = self.iteration.borrow();
            (iteration.verdict(record)?, iteration.norm(record))
        };
        let factor = match max_norm.zip(norm.as_ref()) {
            Some((max_norm, norm)) => Some(ffi::clip_factor(norm, max_norm)?),
            None => None,
        };
        let mut step = Step::default();
        step = grad_scale.map_or(step, |scale| step.with_grad_scale(scale));
        step = factor.as_ref().map_or(step, |factor| step.with_clip_factor(factor));
        let outcome = match (verdict, spikes.zip(norm.as_ref())) {
            (_, Some((spikes, norm))) => spikes.update_unless(optimizer, &step, norm)?,
            (Verdict::Known(false), None) => StepOutcome::known(Taken::Skipped),
            (Verdict::Known(true), None) => {
                update(optimizer, &step)?;
                StepOutcome::known(Taken::Stepped)
            }
            (Verdict::Unless(flag), None) => {
                update(optimizer, &step.with_found_inf(&flag))?;
                StepOutcome::on_device(flag)
            }
        };
        Ok(outcome.with_norm(norm.filter(|_| max_norm.is_some())))
    }

    /// Finds the record whose step is due, or opens one.
    fn claim_for_step(&self, optimizer: &dyn AmpOptimizer, look: Look) -> Result<Option<usize>> {
        self.claim(optimizer, look, |iteration, record, scale, gradients| {
            due(iteration.stage(record))?;
            iteration.verify(record, gradients, scale.tensor())
        })
    }
}

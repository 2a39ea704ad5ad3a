//! Steps of optimizers that unscale and skip on the device.

#![forbid(unsafe_code)]

use tch::Tensor;

use crate::error::{Error, Result};
use crate::optim::{AmpOptimizer, AmpScaling, ScaledStep, check_limit, explained};
use crate::scaler::found::Verdict;
use crate::scaler::iteration::{Look, Stage};
use crate::scaler::outcome::Step;
use crate::scaler::step::due;
use crate::scaler::{GradScaler, StepOutcome};
use crate::{autocast, ffi};

/// Takes a step that unscales and skips on the device, or leaves it out. Does not wait.
fn take_scaled_step(
    scaling: &mut dyn AmpScaling,
    step: &ScaledStep<'_>,
    verdict: Verdict,
) -> Result<StepOutcome> {
    let (found_inf, outcome) = match verdict {
        Verdict::Known(false) => return Ok(StepOutcome::known(Step::Skipped)),
        Verdict::Known(true) => (None, StepOutcome::known(Step::Stepped)),
        Verdict::Unless(flag) => (Some(flag.shallow_clone()), StepOutcome::on_device(flag)),
    };
    let step = ScaledStep { found_inf: found_inf.as_ref(), ..*step };
    autocast::forgetting_casts(|| scaling.step_scaled(&step)).map(|()| outcome)
}

impl GradScaler {
    /// Clips the unscaled gradients to a common 2-norm of at most `max_norm` and steps, if all are finite. Waits as
    /// [`step`](Self::step). Short for [`unscale_`](Self::unscale_), `torch.nn.utils.clip_grad_norm_` and
    /// [`step`](Self::step) in PyTorch.
    ///
    /// The outcome has the [norm](StepOutcome::total_norm). For a fused [`Optimizer`](crate::optim::Optimizer) one pass
    /// over the gradients finds the norm and what is not finite, and the update unscales and clips on its way: the
    /// gradients themselves stay scaled. On a GPU a norm that overflows f32 before it is unscaled counts as an infinite
    /// gradient.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidValue`] for a negative or NaN limit, and as [`step`](Self::step). After an error of the optimizer's
    /// own the gradients may be clipped.
    pub fn step_clip_norm(
        &mut self,
        optimizer: &mut dyn AmpOptimizer,
        max_norm: f64,
    ) -> Result<StepOutcome> {
        self.check_whole("step_clip_norm")?;
        check_limit("max_norm", max_norm)?;
        let record = match self.record_due(optimizer)? {
            None if self.scale.is_some() && optimizer.amp_scaling().is_some() => {
                return self.step_scaled(optimizer, Some(max_norm));
            }
            None => self.open(optimizer)?,
            record => record,
        };
        if let Some(record) = record.filter(|_| optimizer.amp_scaling().is_none()) {
            // Asked before the gradients are clipped, since asking can fail: another try would clip them again.
            self.iteration.borrow_mut().found_inf(record)?;
        }
        let clip = |parameters: &[Tensor]| ffi::clip_grad_norm(parameters, max_norm, false);
        let norm = self.change_gradients(record, optimizer, !max_norm.is_finite(), clip)?;
        Ok(self.step_shared(optimizer)?.with_norm(norm))
    }

    /// Clamps every element of the unscaled gradients to `-max..=max` and steps, if all were finite before. Waits as
    /// [`step`](Self::step). Short for [`unscale_`](Self::unscale_), `torch.nn.utils.clip_grad_value_` and
    /// [`step`](Self::step) in PyTorch.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidValue`] for a negative or NaN limit; [`Error::Gradient`] for a sparse gradient; and as
    /// [`step`](Self::step).
    pub fn step_clip_value(
        &mut self,
        optimizer: &mut dyn AmpOptimizer,
        max: f64,
    ) -> Result<StepOutcome> {
        self.check_whole("step_clip_value")?;
        check_limit("max", max)?;
        let record = match self.record_due(optimizer)? {
            None => self.open(optimizer)?,
            record => record,
        };
        // An infinite gradient was found before it was clamped to a finite one.
        let clamp = |parameters: &[Tensor]| {
            ffi::clip_grad_value(parameters, max).map_err(|error| explained(parameters, error))
        };
        self.change_gradients(record, optimizer, false, clamp)?;
        self.step_shared(optimizer)
    }

    /// Finds the record of an optimizer that has been unscaled and whose step is due.
    fn record_due(&self, optimizer: &dyn AmpOptimizer) -> Result<Option<usize>> {
        let record = self.record(optimizer)?;
        record.map_or(Ok(()), |record| due(self.iteration.borrow().stage(record)))?;
        Ok(record)
    }

    /// Steps an optimizer that unscales and skips by itself. `clip` only where its gradients are still scaled.
    pub(crate) fn step_scaled(
        &self,
        optimizer: &mut dyn AmpOptimizer,
        clip: Option<f64>,
    ) -> Result<StepOutcome> {
        // Where unscaling can overflow, the norm of what it makes of the gradients tells.
        let enlarges = self.scale.as_ref().is_some_and(|scale| scale.enlarges());
        let look = if clip.is_some() || enlarges { Look::Norm } else { Look::Check };
        if look == Look::Norm {
            // The norm is that of the unscaled gradients in their dtype.
            self.prepare_unscale(optimizer)?;
        }
        let Some((record, scale)) = self.claim_for_step(optimizer, look)?.zip(self.scale.as_ref())
        else {
            return Ok(StepOutcome::known(Step::NoGradients));
        };
        let scaled = self.iteration.borrow().stage(record) == Stage::Looked;
        let taken = self.take(record, optimizer, scaled.then(|| scale.tensor()), clip);
        let mut iteration = self.iteration.borrow_mut();
        match taken {
            Ok(_) => iteration.set_stage(record, Stage::Stepped),
            // Where nothing was changed the step can be tried again. On a GPU the kernels may have unscaled some of the
            // gradients.
            Err(_) if scaled && iteration.is_untouched(record) => iteration.abandon(record),
            Err(_) if scaled => iteration.set_broken(record),
            Err(_) => {}
        }
        taken
    }

    fn take(
        &self,
        record: usize,
        optimizer: &mut dyn AmpOptimizer,
        grad_scale: Option<&Tensor>,
        clip: Option<f64>,
    ) -> Result<StepOutcome> {
        let (verdict, norm) = {
            let mut iteration = self.iteration.borrow_mut();
            (iteration.verdict(record)?, iteration.norm(record))
        };
        let factor = match clip.zip(norm.as_ref()) {
            Some((max_norm, norm)) => Some(ffi::clip_factor(norm, max_norm)?),
            None => None,
        };
        let Some(scaling) = optimizer.amp_scaling() else {
            let gone = "amp_scaling() was there and is no more";
            return Err(Error::Optimizer(gone.into()));
        };
        let step = ScaledStep { grad_scale, clip: factor.as_ref(), found_inf: None };
        Ok(take_scaled_step(scaling, &step, verdict)?.with_norm(norm.filter(|_| clip.is_some())))
    }
}

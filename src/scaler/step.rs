//! The calls of an iteration after the backward pass: unscaling, clipping and stepping an optimizer, and the update.

use std::sync::{Arc, Weak};

use tch::{Device, Kind, Tensor};

use crate::capture;
use crate::error::{Error, GradientError, GradientProblem, Result, ScalerError, ensure_defined};
use crate::ffi::{self, FoundInf, Gradient, OutsideRegions};
use crate::gradients::{
    ClipNorm, Gradients, Plan, Preparation, check_limit, clamp, unclampable, unclippable,
};
use crate::optim::{AmpOptimizer, Optimizer, Step, drop_gradients, take_step};
use crate::scale::{AdaptiveScale, End, ScaleTensor, end_all};
use crate::scaler::carried::Aside;
use crate::scaler::grad_scaler::{Agreement, Averaged};
use crate::scaler::iteration::{Owner, RecordId};
use crate::scaler::outcome::StepResult;
use crate::scaler::record::{OverflowCheck, Stage, StepStart};
use crate::scaler::{GradScaler, SpikeDetector, StepOutcome, Unscaled};

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
    /// [`ScalerError::AlreadyUnscaled`], [`ScalerError::UnscaleAfterStep`], [`GradientError::Shared`],
    /// [`GradientError::MixedScales`] for a sum of [gradients of two scales](Self#gradients-from-before-an-update), and
    /// [`GradientError::Unsupported`]; no gradient is changed then. [`Error::Torch`] if libtorch fails. If memory ran
    /// out, no gradient is unscaled and the call can be repeated; if libtorch failed midway, later calls return
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
    /// again. Gradients that a backward has made since the last step are new, also for the same parameters. After a
    /// step the autocast weight cache is cleared. If optimizers share gradients on a GPU that were zeroed in place
    /// after a step in the same iteration, the call synchronizes to learn that nothing is left of them.
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
            take_step(optimizer, &Step::default())?;
            return Ok(self.noted(StepOutcome::known(StepResult::Stepped)));
        };
        if optimizer.takes_scaled_gradients() {
            return self.step_scaled(optimizer, scale, None, None);
        }
        let remedy = "the host decides whether it steps; use one of `tch_amp::optim`";
        capture::refuse("an optimizer that does not take scaled gradients", remedy)?;
        match self.begin_step(optimizer, Preparation::Unscale)? {
            Some(record) => self.step_unscaled(record, optimizer),
            None => Ok(StepOutcome::known(StepResult::NoGradients)),
        }
    }

    /// Takes the step if the record allows it. Synchronizes to find out whether it does.
    fn step_unscaled(
        &self,
        record: RecordId,
        optimizer: &mut dyn AmpOptimizer,
    ) -> Result<StepOutcome> {
        let found_inf = self.iteration.borrow_mut()[record].found_inf()?;
        let taken = if found_inf {
            StepResult::Skipped
        } else {
            // The iteration is not borrowed meanwhile: the optimizer may use the scaler.
            take_step(optimizer, &Step::default())?;
            StepResult::Stepped
        };
        self.iteration.borrow_mut().set_stepped(record);
        Ok(self.noted(StepOutcome::known(taken)))
    }

    /// Notes what a step did, for the warning about first steps that are all skipped.
    fn noted(&self, outcome: StepOutcome) -> StepOutcome {
        self.first.borrow_mut().note(&outcome);
        outcome
    }

    /// Steps an optimizer that unscales and skips by itself, and clips if asked to. Does not synchronize.
    pub(crate) fn step_scaled(
        &self,
        optimizer: &mut dyn AmpOptimizer,
        scale: &ScaleTensor,
        clip: Option<ClipNorm>,
        spikes: Option<&mut SpikeDetector>,
    ) -> Result<StepOutcome> {
        let preparation = clip.map_or(Preparation::Check, |clip| Preparation::Norm(clip.norm_type));
        let Some(record) = self.begin_step(optimizer, preparation)? else {
            return Ok(StepOutcome::known(StepResult::NoGradients));
        };
        let (scaled, check, norm) = {
            let record = &self.iteration.borrow()[record];
            let norm = record.norm.as_ref().map(Tensor::shallow_clone);
            (record.stage == Stage::Checked, record.overflow_check(), norm)
        };
        let grad_scale = scaled.then(|| scale.tensor());
        let outcome = check.and_then(|check| {
            let outcome =
                update_scaled(optimizer, grad_scale, check, clip.zip(norm.as_ref()), spikes)?;
            Ok(outcome.with_norm(norm.filter(|_| clip.is_some())))
        });
        let mut iteration = self.iteration.borrow_mut();
        match outcome {
            Ok(_) => iteration.set_stepped(record),
            // If nothing was changed, the step can be tried again. On a GPU the kernels may have unscaled some of the
            // gradients.
            Err(_) if scaled && iteration[record].is_untouched() => iteration.withdraw(record),
            Err(_) if scaled => iteration[record].set_broken(),
            Err(_) => {}
        }
        outcome.map(|outcome| self.noted(outcome))
    }

    /// Clips the unscaled gradients to a common norm of at most `clip`, such as a number for the 2-norm, and steps the
    /// optimizer if all of them are finite. Unscales first unless that was done, and synchronizes like
    /// [`step`](Self::step). Corresponds to [`unscale_`](Self::unscale_), `torch.nn.utils.clip_grad_norm_` and
    /// [`step`](Self::step) in PyTorch.
    ///
    /// The gradients are multiplied by min(1, max_norm / (norm + 1e-6)); [`StepOutcome::total_norm`] returns the norm.
    ///
    /// With a fused [`Optimizer`](crate::optim::Optimizer) that was not unscaled before, one pass over the gradients
    /// takes the norm and finds non-finite values, and the update itself unscales and clips: the gradients stay scaled.
    /// A norm that is not finite counts as an infinite gradient; a [disabled](Self::disabled) scaler skips nothing, and
    /// steps with gradients that such a norm makes zero or NaN, as in PyTorch. On a GPU the norm is taken in f32,
    /// unless all gradients are f64, and a 2-norm overflows if the gradients are larger than about 1e19.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for a negative or NaN limit, for a type of norm that is not more than 0, and for
    /// [`error_if_nonfinite`](ClipNorm::error_if_nonfinite), since the step is skipped instead;
    /// [`GradientError::Unsupported`] for a sparse gradient; and the errors of [`step`](Self::step). If the optimizer's
    /// own step fails, the gradients may already be clipped.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Tensor};
    /// use tch_amp::GradScaler;
    /// use tch_amp::optim::Sgd;
    ///
    /// # let w = Tensor::from_slice(&[0f32, 0.0]).set_requires_grad(true);
    /// # let mut opt = Sgd::default().build(&[w.shallow_clone()], 1.0)?;
    /// # let mut scaler = GradScaler::new(Device::Cpu)?;
    /// scaler.backward(&(&w * Tensor::from_slice(&[3f32, 4.0])).sum(None))?;
    /// let outcome = scaler.step_clip_norm(&mut opt, 1.0)?;
    /// scaler.update()?;
    /// assert_eq!(outcome.total_norm().map(|norm| norm.double_value(&[])), Some(5.0));
    /// assert!((w.square().sum(None).double_value(&[]) - 1.0).abs() < 1e-5);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn step_clip_norm(
        &mut self,
        optimizer: &mut dyn AmpOptimizer,
        clip: impl Into<ClipNorm>,
    ) -> Result<StepOutcome> {
        let clip = clip.into().checked_for_step()?;
        let record = self.record_due(optimizer)?;
        let takes_scaled = optimizer.takes_scaled_gradients();
        if let (None, Some(scale), true) = (record, self.scale.number(), takes_scaled) {
            return self.step_scaled(optimizer, scale, Some(clip), None);
        }
        let record = self.or_open(record, optimizer, unclippable)?;
        let norm = self.clip_unscaled(record, optimizer, clip, !takes_scaled)?;
        Ok(self.step_shared(optimizer)?.with_norm(norm))
    }

    /// Clamps every element of the unscaled gradients to `-max..=max` and steps the optimizer if all of them were
    /// finite before. Unscales first unless that was done, and synchronizes like [`step`](Self::step). Corresponds to
    /// [`unscale_`](Self::unscale_), `torch.nn.utils.clip_grad_value_` and [`step`](Self::step) in PyTorch.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for a negative or NaN limit; [`GradientError::Unsupported`] for a sparse or complex
    /// gradient; and the errors of [`step`](Self::step).
    pub fn step_clip_value(
        &mut self,
        optimizer: &mut dyn AmpOptimizer,
        max: f64,
    ) -> Result<StepOutcome> {
        check_limit("max", max)?;
        let record = self.record_due(optimizer)?;
        let record = self.or_open(record, optimizer, unclampable)?;
        // Infinite gradients are found before clamping makes them finite.
        self.change_gradients(record, optimizer, false, |all| clamp(all, max))?;
        self.step_shared(optimizer)
    }

    /// Trains by one loss: drops the gradients of the optimizer's parameters, scales the loss, runs backward, steps,
    /// and ends the iteration. The whole of an iteration with one loss and one optimizer, like tch's `backward_step`;
    /// it stands for `zero_grad`, [`backward`](Self::backward), [`step`](Self::step) and [`update`](Self::update), and
    /// synchronizes where these do.
    ///
    /// # Errors
    ///
    /// Those of the four calls, and [`ScalerError::StepDue`] while an optimizer, this one or another, has been unscaled
    /// and not stepped; nothing is changed then. If the loss cannot be scaled, the gradients are kept. After an error
    /// of the step the iteration is open, and [`abandon`](Self::abandon) or [`update`](Self::update) ends it; an error
    /// of `update`, such as [`ScalerError::TooManySkips`], comes after it has ended.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Tensor};
    /// use tch_amp::optim::Sgd;
    /// use tch_amp::{GradScaler, autocast};
    ///
    /// let w = Tensor::from_slice(&[1f32]).set_requires_grad(true);
    /// let mut opt = Sgd::default().build(&[w.shallow_clone()], 0.25)?;
    /// let mut scaler = GradScaler::new(Device::Cpu)?;
    /// for _ in 0..3 {
    ///     let loss = autocast(Device::Cpu, || w.square().sum(None))?;
    ///     scaler.backward_step(&mut opt, &loss)?;
    /// }
    /// assert_eq!(w.double_value(&[0]), 0.125);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn backward_step(
        &mut self,
        optimizer: &mut dyn AmpOptimizer,
        loss: &Tensor,
    ) -> Result<StepOutcome> {
        self.iterate("backward_step", optimizer, loss, |scaler, optimizer| scaler.step(optimizer))
    }

    /// Trains by one loss like [`backward_step`](Self::backward_step), and clips the gradients to a common norm like
    /// [`step_clip_norm`](Self::step_clip_norm). The counterpart of tch's `backward_step_clip_norm`.
    ///
    /// # Errors
    ///
    /// Those of [`backward_step`](Self::backward_step) and [`step_clip_norm`](Self::step_clip_norm); for options that
    /// that refuses before anything is changed.
    pub fn backward_step_clip_norm(
        &mut self,
        optimizer: &mut dyn AmpOptimizer,
        loss: &Tensor,
        clip: impl Into<ClipNorm>,
    ) -> Result<StepOutcome> {
        let clip = clip.into().checked_for_step()?;
        let step = |scaler: &mut Self, optimizer: &mut dyn AmpOptimizer| {
            scaler.step_clip_norm(optimizer, clip)
        };
        self.iterate("backward_step_clip_norm", optimizer, loss, step)
    }

    /// Trains by one loss like [`backward_step`](Self::backward_step), and clamps every element of the gradients like
    /// [`step_clip_value`](Self::step_clip_value). The counterpart of tch's `backward_step_clip`.
    ///
    /// # Errors
    ///
    /// Those of [`backward_step`](Self::backward_step) and [`step_clip_value`](Self::step_clip_value); for a negative
    /// or NaN limit before anything is changed.
    pub fn backward_step_clip_value(
        &mut self,
        optimizer: &mut dyn AmpOptimizer,
        loss: &Tensor,
        max: f64,
    ) -> Result<StepOutcome> {
        check_limit("max", max)?;
        let step = |scaler: &mut Self, optimizer: &mut dyn AmpOptimizer| {
            scaler.step_clip_value(optimizer, max)
        };
        self.iterate("backward_step_clip_value", optimizer, loss, step)
    }

    fn iterate(
        &mut self,
        call: &'static str,
        optimizer: &mut dyn AmpOptimizer,
        loss: &Tensor,
        step: impl FnOnce(&mut Self, &mut dyn AmpOptimizer) -> Result<StepOutcome>,
    ) -> Result<StepOutcome> {
        ensure_defined("loss", loss)?;
        // First, since what a failed capture has left is not due.
        self.refuse_open_iteration()?;
        self.iteration.get_mut().refuse_due(call)?;
        let scaled = self.scale(loss)?;
        drop_gradients(optimizer)?;
        scaled.f_backward()?;
        let outcome = step(self, optimizer)?;
        self.update()?;
        Ok(outcome)
    }

    /// Returns the record, or unscales and opens one, unless there is a `problem` with clipping a gradient.
    fn or_open(
        &self,
        record: Option<RecordId>,
        optimizer: &dyn AmpOptimizer,
        problem: fn(&Gradient) -> Option<GradientProblem>,
    ) -> Result<Option<RecordId>> {
        if record.is_some() {
            return Ok(record);
        }
        self.gradients(optimizer)?.refuse(Gradient::is_used, problem)?;
        self.open(optimizer)
    }

    /// Finds the record of an optimizer that has been unscaled and not stepped yet.
    pub(super) fn record_due(&self, optimizer: &dyn AmpOptimizer) -> Result<Option<RecordId>> {
        let record = self.record(optimizer)?;
        record.map_or(Ok(()), |record| self.iteration.borrow()[record].stage.check_due())?;
        Ok(record)
    }

    /// Clips the gradients like [`step_clip_norm`](Self::step_clip_norm) and steps, unless their norm before clipping,
    /// or the loss that the detector watches, is far above its recent history. Never synchronizes: the device decides
    /// through the same flag as for infinite gradients. The history is of norms, so clip by the same type every time.
    ///
    /// A step that is skipped as a spike changes nothing, and the scale does not fall for it. Give `f64::INFINITY` to
    /// skip without clipping. A disabled scaler skips as well, for training in bf16 and f32; it then also skips steps
    /// with infinite gradients.
    ///
    /// # Errors
    ///
    /// [`ScalerError::AlreadyUnscaled`] if [`unscale_`](Self::unscale_) was called in this iteration;
    /// [`Error::InvalidArgument`] after [`agree_over`](Self::agree_over), because the ranks then have gradients, and
    /// therefore norms, of their own, and would get out of sync; the errors of
    /// [`step_clip_norm`](Self::step_clip_norm); [`Error::Torch`] if a watched loss is not one floating-point number.
    /// The history is then as before.
    pub fn step_unless_spike(
        &mut self,
        optimizer: &mut Optimizer,
        clip: impl Into<ClipNorm>,
        spikes: &mut SpikeDetector,
    ) -> Result<StepOutcome> {
        let clip = clip.into().checked_for_step()?;
        if self.agreement.is_some() {
            let problem = "cannot be used by a scaler that agrees over a group, whose ranks have norms of their own";
            return Err(Error::InvalidArgument { name: "spikes", problem: problem.to_owned() });
        }
        let Some(scale) = self.scale.number() else {
            return self.step_without_scale(optimizer, clip, spikes);
        };
        if self.record_due(optimizer)?.is_some() {
            return Err(Error::Scaler(ScalerError::AlreadyUnscaled));
        }
        self.step_scaled(optimizer, scale, Some(clip), Some(spikes))
    }

    /// Steps with gradients that were never scaled.
    fn step_without_scale(
        &self,
        optimizer: &mut Optimizer,
        clip: ClipNorm,
        spikes: &mut SpikeDetector,
    ) -> Result<StepOutcome> {
        self.check_synced(optimizer)?;
        let norm = {
            let mut gradients = self.gradients(optimizer)?;
            if !gradients.snapshot().iter().any(Gradient::is_used) {
                return Ok(StepOutcome::known(StepResult::NoGradients));
            }
            gradients.refuse(Gradient::is_used, unclippable)?;
            gradients.separate()?;
            Plan::new(&gradients, true)?.norm(gradients.parameters(), clip.norm_type, None)?.norm
        };
        let Some(norm) = norm else { return Ok(StepOutcome::known(StepResult::NoGradients)) };
        let factor = ffi::clip_factor(&norm, clip.max_norm)?;
        let step = Step::default().with_clip_factor(&factor);
        let outcome = spikes.update_unless(optimizer, &step, &norm)?;
        Ok(self.noted(outcome.with_norm(Some(norm))))
    }

    /// Ends the iteration: backs the scale off if the gradients of any optimizer overflowed, and otherwise counts the
    /// iteration towards growth. The counterpart of `update`.
    ///
    /// The scale does not change if unscaling broke off and nothing else was checked.
    ///
    /// Synchronizes only where the host has not read whether an iteration overflowed, because the optimizer was fused
    /// or not stepped, and either `error_at_min_scale` or `max_consecutive_skips` is set, or the scale is on the CPU
    /// and the gradients are on a GPU.
    ///
    /// # Errors
    ///
    /// [`ScalerError::NoInfChecks`] if no gradient was checked since the last update, and
    /// [`ScalerError::UnscaleFailed`] if unscaling broke off and the gradients were not zeroed since;
    /// [`GradientError::Unsynced`] while a model on several ranks accumulates gradients that were scaled; nothing is
    /// changed then. [`ScalerError::TooManySkips`] at the configured limit, and [`ScalerError::ScaleAtMinimum`] with
    /// `error_at_min_scale`; the iteration has been ended as usual then.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Tensor};
    /// use tch_amp::optim::Sgd;
    /// use tch_amp::scaler::GradScalerConfig;
    ///
    /// # let w = Tensor::from_slice(&[1f32]).set_requires_grad(true);
    /// # let mut opt = Sgd::default().build(&[w.shallow_clone()], 0.1)?;
    /// let mut scaler = GradScalerConfig {
    ///     init_scale: 4.0,
    ///     growth_interval: 2,
    ///     ..Default::default()
    /// }.build(Device::Cpu)?;
    /// let mut scales = Vec::new();
    /// for gradient in [1.0, 1.0, f64::INFINITY] {
    ///     opt.zero_grad()?;
    ///     scaler.backward(&(&w * gradient).sum(None))?;
    ///     scaler.step(&mut opt)?;
    ///     scaler.update()?;
    ///     scales.push(scaler.get_scale()?);
    /// }
    /// assert_eq!(scales, [4.0, 8.0, 4.0]);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn update(&mut self) -> Result<()> {
        if !self.scale.is_enabled() {
            self.close();
            return Ok(());
        }
        self.check_scale_may_change()?;
        let iteration = self.iteration.get_mut();
        let is_broken = iteration.check_broken()?;
        let given_up = if is_broken && iteration.found().next().is_none() {
            None
        } else {
            let end = self.scale.end(iteration.found())?;
            let present = end.as_ref().map(End::present);
            let ending = present.map(|(present, changes)| iteration.ending(present, changes));
            let ending = ending.transpose()?;
            let given_up = end_all(&mut Vec::from_iter(end))?;
            iteration.carried().end(ending.unwrap_or_default());
            given_up
        };
        self.close();
        given_up.map_or(Ok(()), Err)
    }

    /// Sets the scale, if the gradients that are left can keep theirs.
    fn set_scale(&mut self, set: impl FnOnce(&mut AdaptiveScale) -> Result<()>) -> Result<()> {
        let iteration = self.iteration.get_mut();
        iteration.check_broken()?;
        let ending = self.scale.number().map(|present| iteration.ending(present, true));
        let ending = ending.transpose()?;
        set(&mut self.scale)?;
        iteration.carried().end(ending.unwrap_or_default());
        Ok(())
    }

    /// Closes the iteration, and warns if it is the last of too many without a step.
    fn close(&mut self) {
        self.iteration.get_mut().close();
        self.first.get_mut().end_iteration(self.scale.number());
    }

    /// Ends the iteration and sets the scale to a given value. The growth tracker and the count of skips do not change.
    /// Does not synchronize. Corresponds to `update(new_scale)` with a number in PyTorch.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] unless `new_scale` is from `min_scale` to `max_scale`; [`GradientError::Unsynced`]
    /// and [`ScalerError::UnscaleFailed`] as in [`update`](Self::update). Nothing is changed then.
    pub fn update_with(&mut self, new_scale: f64) -> Result<()> {
        self.check_scale_may_change()?;
        self.set_scale(|scale| scale.set_scale(new_scale))?;
        self.close();
        Ok(())
    }

    /// Ends the iteration and sets the scale to the value of a one-element tensor. Corresponds to `update(new_scale)`
    /// with a tensor in PyTorch. The value is copied: a later change of `new_scale` in place has no effect.
    ///
    /// If the tensor and the scale are on GPUs, this does not synchronize: the device checks the value. A value that is
    /// not from `min_scale` to `max_scale` leaves the scale as it is, and the next call that reads the scale, such as
    /// [`get_scale`](Self::get_scale) or [`state_dict`](Self::state_dict), returns the error, once. A tensor on a GPU
    /// for a scale on the CPU is read at once, which synchronizes.
    ///
    /// # Errors
    ///
    /// The same as [`update_with`](Self::update_with), also for a complex tensor and for one that does not have exactly
    /// one element, and for an undefined one.
    pub fn update_with_tensor(&mut self, new_scale: &Tensor) -> Result<()> {
        ensure_defined("new_scale", new_scale)?;
        let _own = OutsideRegions::enter();
        let value = new_scale.f_view(-1)?.f_detach()?;
        let elements = ffi::numel(&value);
        if elements != 1 {
            let (field, value) = ("the number of elements of new_scale", elements as f64);
            return Err(Error::out_of_range(field, value, "1"));
        }
        if value.f_is_complex()? {
            let problem = "is a complex tensor; give a real one".to_owned();
            return Err(Error::InvalidArgument { name: "new_scale", problem });
        }
        self.check_scale_may_change()?;
        let value = value.f_view([0i64; 0])?;
        self.set_scale(|scale| scale.set_scale_to(&value))?;
        self.close();
        Ok(())
    }

    /// Removes an optimizer from this iteration, for a loop that neither steps it nor calls `update` after unscaling
    /// it. Its gradients stay as they are, unscaled, and a later step does not divide them again: zero them before the
    /// next backward. PyTorch has no counterpart.
    ///
    /// A recorded overflow is discarded, too: if it is the reason for not stepping, call `update` instead, or the scale
    /// will never back off. An optimizer that was dropped counts until `update`, unless it was abandoned before. An
    /// optimizer that was not unscaled is ignored.
    ///
    /// # Errors
    ///
    /// [`ScalerError::AlreadyStepped`] if its step was taken or skipped; [`ScalerError::UnscaleFailed`] if unscaling
    /// broke off and its gradients were not zeroed since; [`Error::Torch`] if its parameters cannot be read.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, Tensor};
    /// use tch_amp::GradScaler;
    /// use tch_amp::optim::Sgd;
    ///
    /// # let w = Tensor::from_slice(&[1f32]).set_requires_grad(true);
    /// # let mut opt = Sgd::default().build(&[w.shallow_clone()], 0.25)?;
    /// let mut scaler = GradScaler::new(Device::Cpu)?;
    /// scaler.backward(&(&w * 1e6).sum(None))?;
    /// scaler.unscale_(&mut opt)?;
    /// // This batch is an outlier: leave it out.
    /// scaler.abandon(&mut opt)?;
    /// opt.zero_grad()?;
    /// scaler.backward(&w.sum(None))?;
    /// assert!(scaler.step(&mut opt)?.is_stepped()?);
    /// scaler.update()?;
    /// assert_eq!(w.double_value(&[0]), 0.75);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn abandon(&mut self, optimizer: &mut dyn AmpOptimizer) -> Result<()> {
        let now = ffi::gradients_inspect(optimizer.parameters().as_slice())?;
        let iteration = self.iteration.get_mut();
        let is_open = |record: &RecordId| iteration[*record].stage != Stage::Stepped;
        match iteration.find(&now).filter(is_open) {
            Some(record) => {
                iteration[record].check_zeroed()?;
                iteration.abandon(record, self.scale.number())
            }
            None => match iteration.owner(&now)? {
                Owner::Record(_) => Err(Error::Scaler(ScalerError::AlreadyStepped)),
                Owner::None | Owner::Shared(_) => Ok(()),
            },
        }
    }
}

impl GradScaler {
    /// Finds the record of the gradients of an optimizer that have been unscaled or stepped with since the last update.
    pub(crate) fn record(&self, optimizer: &dyn AmpOptimizer) -> Result<Option<RecordId>> {
        if !self.iteration()?.is_open() {
            return Ok(None);
        }
        let now = ffi::gradients_inspect(optimizer.parameters().as_slice())?;
        Ok(match self.iteration()?.owner(&now)? {
            Owner::Record(record) => Some(record),
            Owner::None | Owner::Shared(_) => None,
        })
    }

    /// Unscales the gradients and returns their record; `None` if there is nothing to record.
    pub(crate) fn open(&self, optimizer: &dyn AmpOptimizer) -> Result<Option<RecordId>> {
        self.begin(optimizer, Preparation::Unscale, false)
    }

    /// The first half of a step: finds the record whose step is due, or opens one.
    fn begin_step(
        &self,
        optimizer: &dyn AmpOptimizer,
        preparation: Preparation,
    ) -> Result<Option<RecordId>> {
        self.begin(optimizer, preparation, true)
    }

    /// Returns the record of an optimizer's gradients, on which the ranks have agreed.
    fn begin(
        &self,
        optimizer: &dyn AmpOptimizer,
        preparation: Preparation,
        of_step: bool,
    ) -> Result<Option<RecordId>> {
        let begun = self.begin_here(optimizer, preparation, of_step);
        match &self.agreement {
            Some(agreement) if self.is_enabled() => self.agree(agreement.as_ref(), begun),
            _ => begun,
        }
    }

    fn begin_here(
        &self,
        optimizer: &dyn AmpOptimizer,
        preparation: Preparation,
        of_step: bool,
    ) -> Result<Option<RecordId>> {
        self.check_synced(optimizer)?;
        let Some(scale) = self.scale.number() else {
            return Ok(None);
        };
        // The optimizer may use the scaler while it gives its parameters: it is asked before the iteration is borrowed.
        let gradients = self.gradients(optimizer)?;
        let writes = preparation == Preparation::Unscale;
        let start = StepStart {
            scale,
            preparation,
            of_step,
            widens: preparation != Preparation::Check && optimizer.wants_f32_gradients(),
            // Only writing unscaled ones back can lose small values.
            allows_fp16: !writes || self.scale.config().may_unscale_fp16(),
            even_empty: self.agreement.is_some(),
        };
        self.iteration()?.begin(gradients, &start)
    }

    /// Inspects the gradients of an optimizer.
    pub(crate) fn gradients<'a>(
        &'a self,
        optimizer: &'a dyn AmpOptimizer,
    ) -> Result<Gradients<'a>> {
        let name = move |index, identity| {
            let known = || self.names.get(&identity).map(|(name, _)| name.clone());
            optimizer.parameter_name(index).or_else(known)
        };
        Gradients::of(optimizer.parameters(), Box::new(name))
    }

    /// Gives the gradients of an optimizer the present scale, and returns what is known of them, before they are taken
    /// away. Fails before any change if they are unscaled, or if one is a sum of gradients of two scales.
    pub(crate) fn set_aside(&self, optimizer: &dyn AmpOptimizer) -> Result<Option<Aside>> {
        let Some(present) = self.scale.number() else { return Ok(None) };
        let gradients = self.gradients(optimizer)?;
        let plan = Plan::new(&gradients, true)?;
        let mut iteration = self.iteration()?;
        if let Some(record) = iteration.find(gradients.snapshot()) {
            iteration[record].check_zeroed()?;
            if iteration[record].stage == Stage::Unscaled {
                let problem = "has been unscaled and not stepped; step it first, or abandon it and zero its gradients";
                return Err(Error::InvalidArgument {
                    name: "optimizer",
                    problem: problem.to_owned(),
                });
            }
        }
        let gradients = iteration.convert(gradients, &plan, present)?;
        Ok(Some(iteration.carried().set_aside(&gradients)))
    }

    /// Goes on when something of the present scale has been `added` to these gradients, or when they are as before.
    pub(crate) fn put_back(&mut self, aside: Option<Aside>, parameters: &[Tensor], added: bool) {
        let Some(aside) = aside else { return };
        let carried = self.iteration.get_mut().carried();
        match added {
            // Without memory, they count as gradients of the present scale.
            true => drop(carried.join(aside, parameters)),
            false => carried.put_back(aside),
        }
    }

    /// The models whose loss was scaled, and whose gradients this rank has accumulated alone.
    fn alone(&self) -> Vec<Arc<dyn Averaged>> {
        self.ranks.iter().filter_map(Weak::upgrade).filter(|model| model.is_alone()).collect()
    }

    /// Returns an error if an optimizer has gradients that this rank has accumulated alone.
    pub(super) fn check_synced(&self, optimizer: &dyn AmpOptimizer) -> Result<()> {
        let alone = self.alone();
        if alone.is_empty() {
            return Ok(());
        }
        let identities = ffi::identities(optimizer.parameters().as_slice())?;
        if alone.iter().any(|model| model.has_any(&identities)) {
            return Err(Error::Gradient(GradientError::Unsynced));
        }
        Ok(())
    }

    /// Returns an error if the scale may change while a model accumulates gradients that were scaled by it.
    pub(super) fn check_scale_may_change(&self) -> Result<()> {
        let config = self.scale.config();
        if config.min_scale < config.max_scale && !self.alone().is_empty() {
            return Err(Error::Gradient(GradientError::Unsynced));
        }
        Ok(())
    }

    /// Adds what the other ranks have found to the record of an optimizer. If one of them has failed, a step that has
    /// not begun can be tried again.
    pub(super) fn agree(
        &self,
        agreement: &dyn Agreement,
        begun: Result<Option<RecordId>>,
    ) -> Result<Option<RecordId>> {
        let mut iteration = self.iteration()?;
        let record = begun.as_ref().ok().copied().flatten();
        let found = begun.and_then(|record| match record {
            Some(record) => iteration[record].found_inf(),
            None => Ok(false),
        });
        let here = matches!(found, Ok(true));
        let agreed = agreement.any(found).and_then(|anywhere| {
            // `update` also needs the answer of a rank without gradients, which has looked at nothing.
            let is_new =
                |record: &RecordId| anywhere != here || iteration[*record].found.is_empty();
            if let Some(record) = record.filter(is_new) {
                let flag = f64::from(u8::from(anywhere));
                let tensor = ffi::number_new(flag, Kind::Float, Device::Cpu)?;
                iteration[record].found.push(FoundInf { tensor, host: Some(anywhere) });
            }
            Ok(record)
        });
        match record {
            Some(record) if agreed.is_err() && iteration[record].stage == Stage::Checked => {
                iteration.withdraw(record);
            }
            _ => {}
        }
        agreed
    }
}

/// Steps an optimizer that unscales and skips by itself, unless the host knows that the step is skipped, and clips if
/// there is a norm.
fn update_scaled(
    optimizer: &mut dyn AmpOptimizer,
    grad_scale: Option<&Tensor>,
    check: OverflowCheck,
    clip: Option<(ClipNorm, &Tensor)>,
    spikes: Option<&mut SpikeDetector>,
) -> Result<StepOutcome> {
    let factor = clip.map(|(clip, norm)| ffi::clip_factor(norm, clip.max_norm)).transpose()?;
    let mut step = Step::default();
    step = grad_scale.map_or(step, |scale| step.with_grad_scale(scale));
    step = factor.as_ref().map_or(step, |factor| step.with_clip_factor(factor));
    if let Some((spikes, (_, norm))) = spikes.zip(clip) {
        return spikes.update_unless(optimizer, &step, norm);
    }
    match check {
        OverflowCheck::Known(false) => Ok(StepOutcome::known(StepResult::Skipped)),
        OverflowCheck::Known(true) => {
            take_step(optimizer, &step)?;
            Ok(StepOutcome::known(StepResult::Stepped))
        }
        OverflowCheck::Unless(flag) => {
            take_step(optimizer, &step.with_found_inf(&flag))?;
            Ok(StepOutcome::on_device(flag))
        }
    }
}

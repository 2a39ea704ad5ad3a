//! Clipping and stepping in one call.

use tch::Tensor;

use crate::error::Result;
#[cfg(doc)]
use crate::error::{Error, GradientError};
use crate::ffi::{Gradient, Snapshot};
use crate::gradients::{Plan, check_limit, clamp, reduce_norm, unclampable, unclippable};
use crate::optim::AmpOptimizer;
use crate::scaler::step::due;
use crate::scaler::{GradScaler, StepOutcome};

impl GradScaler {
    /// Clips the unscaled gradients to a common 2-norm of at most `max_norm` and steps the optimizer if all of them are
    /// finite. Unscales first unless that was done, and synchronizes like [`step`](Self::step). Corresponds to
    /// [`unscale_`](Self::unscale_), `torch.nn.utils.clip_grad_norm_` and [`step`](Self::step) in PyTorch.
    ///
    /// The gradients are multiplied by min(1, max_norm / (norm + 1e-6)); [`StepOutcome::total_norm`] returns the norm.
    ///
    /// With a fused [`Optimizer`](crate::optim::Optimizer) that was not unscaled before, one pass over the gradients
    /// takes the norm and finds non-finite values, and the update itself unscales and clips: the gradients stay scaled.
    /// A norm that is not finite counts as an infinite gradient. On a GPU the norm is taken in f32, unless all gradients
    /// are f64, and overflows if the gradients are larger than about 1e19.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for a negative or NaN limit; [`GradientError::Unsupported`] for a sparse gradient; and
    /// the errors of [`step`](Self::step). If the optimizer's own step fails, the gradients may already be clipped.
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
        max_norm: f64,
    ) -> Result<StepOutcome> {
        check_limit("max_norm", max_norm)?;
        let record = self.record_due(optimizer)?;
        let takes_scaled = optimizer.takes_scaled_gradients();
        if let (None, Some(scale), true) = (record, self.scale.number(), takes_scaled) {
            return self.step_scaled(optimizer, scale, Some(max_norm), None);
        }
        let record = self.or_open(record, optimizer, unclippable)?;
        let norm = self.clip_unscaled(record, optimizer, max_norm, !takes_scaled)?;
        Ok(self.step_shared(optimizer)?.with_norm(norm))
    }

    /// Clips the unscaled gradients of a record and returns their norm. A norm that is not finite counts as an infinite
    /// gradient, since clipping by it would make all gradients zero. With `reads`, the host asks the devices for their
    /// answers before the gradients change: that can fail, and a retry would clip them again.
    pub(super) fn clip_unscaled(
        &self,
        record: Option<usize>,
        optimizer: &dyn AmpOptimizer,
        max_norm: f64,
        reads: bool,
    ) -> Result<Option<Tensor>> {
        let look_again = !max_norm.is_finite();
        let Some(index) = record else {
            let clip = |parameters: &[Tensor]| reduce_norm(parameters, max_norm, false);
            return self.change_gradients(None, optimizer, look_again, clip);
        };
        let gradients = self.gradients(optimizer)?;
        let mut iteration = self.iteration.borrow_mut();
        iteration.compare(index, &gradients)?;
        gradients.drop_frozen()?;
        gradients.refuse(Gradient::is_used, unclippable)?;
        let plan = Plan::new(&gradients, true)?;
        let findings = plan.norm(gradients.parameters(), None)?;
        let Some(norm) = findings.norm.filter(|_| !findings.found.is_empty()) else {
            return Ok(None);
        };
        findings.found.into_iter().for_each(|found| iteration.add_found(index, found));
        if reads {
            iteration.found_inf(index)?;
        }
        plan.clip(gradients.parameters(), &norm, max_norm)?;
        iteration.accept(index, Snapshot::of(gradients.parameters())?, look_again);
        Ok(Some(norm))
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

    /// Returns the record, or unscales and opens one, unless there is a `problem` with clipping a gradient.
    fn or_open(
        &self,
        record: Option<usize>,
        optimizer: &dyn AmpOptimizer,
        problem: fn(&Gradient) -> Option<&'static str>,
    ) -> Result<Option<usize>> {
        if record.is_some() {
            return Ok(record);
        }
        self.gradients(optimizer)?.refuse(Gradient::is_used, problem)?;
        self.open(optimizer)
    }

    /// Finds the record of an optimizer that has been unscaled and not stepped yet.
    pub(super) fn record_due(&self, optimizer: &dyn AmpOptimizer) -> Result<Option<usize>> {
        let record = self.record(optimizer)?;
        record.map_or(Ok(()), |record| due(self.iteration.borrow().stage(record)))?;
        Ok(record)
    }
}

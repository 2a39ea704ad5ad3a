//! Explains skipped steps.

use tch::Tensor;
use tch::nn::VarStore;

use super::explanation::{Cause, Culprit, Explanation};
use super::rerun::{self, Beginning, Repeatable};
use crate::GradScaler;
use crate::capture;
use crate::error::{Error, Result};
use crate::ffi::{self, OutsideRegions};
use crate::scaler::StepOutcome;

/// Explains skipped steps: it runs an iteration again and finds the operator that made the first non-finite number.
///
/// Call [`begin`](Self::begin) before the forward pass of every iteration, and [`explain`](Self::explain) after a
/// skipped step, before the next `begin`, or [`explain_if_skipped`](Self::explain_if_skipped) after every step.
/// PyTorch's closest counterpart, `torch.autograd.detect_anomaly`, names only
/// the backward operators that return NaN, and slows down every iteration.
///
/// # Examples
///
/// ```
/// use tch::{Device, Kind, Tensor, nn};
/// use tch_amp::insight::{Cause, Tracer, named};
/// use tch_amp::{Autocast, GradScaler, Result, optim::AdamW};
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let layer = nn::linear(vs.root() / "layer", 4, 4, Default::default());
/// let mut optimizer = AdamW::default().build(&vs, 1e-3)?;
/// let mut scaler = GradScaler::new(Device::Cpu)?;
/// let region = Autocast::new(Device::Cpu).dtype(Kind::BFloat16);
/// let mut tracer = Tracer::new(&vs)?;
/// # let batches = [Tensor::ones([2, 4], (Kind::Float, Device::Cpu)), Tensor::full([2, 4], f64::NAN, (Kind::Float, Device::Cpu))];
/// for batch in &batches {
///     let loss = || region.run(|| named("loss", || batch.apply(&layer).square().mean(Kind::Float)));
///     tracer.begin(&scaler)?;
///     optimizer.zero_grad()?;
///     scaler.backward(&loss()?)?;
///     let skipped = scaler.step(&mut optimizer)?.is_skipped()?;
///     scaler.update()?;
///     if skipped && let Some(explanation) = tracer.explain(&scaler, loss)? {
///         println!("{explanation}");
///         assert!(matches!(explanation.cause, Cause::Input { .. }));
///     }
/// }
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Debug)]
pub struct Tracer {
    repeatable: Repeatable,
    iteration: u64,
    began: Option<Began>,
    left: usize,
    overflow: Option<Overflow>,
}

/// The last explained overflow, if the scale was its cause.
#[derive(Debug)]
struct Overflow {
    part: String,
    scale: f64,
    iteration: u64,
    /// How often in succession the part has overflowed while the scale fell.
    repeated: u32,
}

impl Overflow {
    fn new(culprit: &Culprit, scale: f64, iteration: u64, before: Option<Self>) -> Self {
        let Culprit { path, after, operator, .. } = culprit;
        let part = path.as_ref().or(after.as_ref()).unwrap_or(operator).clone();
        let before = before.filter(|before| before.part == part);
        let repeated = before.map_or(1, |before| match before.iteration == iteration {
            true => before.repeated,
            false if scale < before.scale => before.repeated.saturating_add(1),
            false => 1,
        });
        Self { part, scale, iteration, repeated }
    }
}

/// The state with which an iteration began.
#[derive(Debug)]
struct Began {
    beginning: Beginning,
    /// A copy of the scale; `None` for a disabled scaler.
    scale: Option<Tensor>,
}

impl Tracer {
    /// Creates a tracer for the model of `vs`, which explains at most ten steps; see [`limit`](Self::limit). It knows
    /// the variables that `vs` has now.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if libtorch cannot tell which variables are trainable.
    pub fn new(vs: &VarStore) -> Result<Self> {
        let (iteration, began, left, overflow) = (0, None, 10, None);
        Ok(Self { repeatable: Repeatable::new(vs)?, iteration, began, left, overflow })
    }

    /// Sets how many steps are explained. Later calls of [`explain`](Self::explain) return `None`, so that a program
    /// whose every step is skipped does not run each iteration several times.
    #[must_use]
    pub fn limit(mut self, explanations: usize) -> Self {
        self.left = explanations;
        self
    }

    /// Counts the iterations from another number, such as the steps that a resumed run has behind it, so that the
    /// explanations of the run carry the same numbers as its [`ScaleHistory`](super::ScaleHistory).
    #[must_use]
    pub fn after(mut self, iterations: u64) -> Self {
        self.iteration = iterations;
        self
    }

    /// Remembers the random number generators, the scale and the buffers at the beginning of an iteration. Of the
    /// variables that are not trainable, those with more than one dimension are not copied, because they are usually
    /// frozen weights. Does not synchronize.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if a generator cannot be read, or memory cannot be allocated.
    pub fn begin(&mut self, scaler: &GradScaler) -> Result<()> {
        capture::refuse("a report of an iteration", "make it of an iteration without a graph")?;
        let _own = OutsideRegions::enter();
        let scale = scaler.scale_number().map(Tensor::f_detach_copy).transpose()?;
        self.began = Some(Began { beginning: self.repeatable.begin()?, scale });
        self.iteration = self.iteration.saturating_add(1);
        Ok(())
    }

    /// Explains a step if it was skipped because of its gradients, and returns `None` if it was taken or if the
    /// [`limit`](Self::limit) is reached. One call of it after each step is all that a loop needs:
    ///
    /// ```no_run
    /// # fn f(tracer: &mut tch_amp::insight::Tracer, scaler: &mut tch_amp::GradScaler,
    /// #     optimizer: &mut tch_amp::optim::Optimizer, loss: impl Fn() -> tch_amp::Result<tch::Tensor>) -> tch_amp::Result<()> {
    /// tracer.begin(scaler)?;
    /// optimizer.zero_grad()?;
    /// scaler.backward(&loss()?)?;
    /// let outcome = scaler.step(optimizer)?;
    /// scaler.update()?;
    /// if let Some(explanation) = tracer.explain_if_skipped(scaler, &outcome, loss)? {
    ///     eprintln!("{explanation}");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Synchronizes in order to learn whether the step was skipped, but no longer after the last explanation. Steps
    /// that a [`SpikeDetector`](crate::scaler::SpikeDetector) left out are not explained.
    ///
    /// # Errors
    ///
    /// Those of [`StepOutcome::is_skipped`] and [`explain`](Self::explain).
    pub fn explain_if_skipped(
        &mut self,
        scaler: &GradScaler,
        outcome: &StepOutcome,
        loss: impl FnMut() -> Result<Tensor>,
    ) -> Result<Option<Explanation>> {
        if self.left == 0 || !outcome.is_skipped()? {
            return Ok(None);
        }
        match outcome.judged() {
            Some(judged) if judged.is_finite()? => Ok(None),
            _ => self.explain(scaler, loss),
        }
    }

    /// Runs the iteration that began last again, and finds out why its gradients are not finite. `loss` computes the
    /// unscaled loss of the same batch, as the iteration did. Returns `None` if the [`limit`](Self::limit) is reached.
    ///
    /// Random numbers are those of the iteration. Gradients, buffers and random numbers are put back afterwards, so
    /// that training goes on as without the call; `loss` must not change anything else. It runs once. If the first
    /// non-finite number is in the backward pass or the scaled loss, it runs again with a scale of 1, and if that is
    /// finite, once or a few times more to find the largest finite scale: at most twelve times in all. Under
    /// `DistributedDataParallel`, call the model itself in `loss`, so that no rank waits for others: the rank whose
    /// explanation has another cause than [`Cause::Finite`] is to blame.
    ///
    /// [`Cause::Finite`]: super::Cause::Finite
    ///
    /// Synchronizes after every operator.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if no iteration has begun, the error of `loss`, and [`Error::Torch`] if the iteration
    /// cannot be recorded.
    pub fn explain(
        &mut self,
        scaler: &GradScaler,
        loss: impl FnMut() -> Result<Tensor>,
    ) -> Result<Option<Explanation>> {
        let Some(Began { beginning, scale }) = &mut self.began else {
            let problem = "has no iteration: call begin before the forward pass".to_owned();
            return Err(Error::InvalidArgument { name: "tracer", problem });
        };
        if self.left == 0 {
            return Ok(None);
        }
        let scale = match scale {
            None => 1.0,
            Some(scale) => ffi::numbers_read(&[&*scale])?[0],
        };
        let rerun = self.repeatable.rerun(beginning)?;
        let (cause, culprit, gradients) = rerun::explain(rerun, scale, loss)?;
        self.left -= 1;
        let (iteration, scale_now) = (self.iteration, scaler.get_scale()?);
        let last = self.overflow.take();
        let culprit_of_scale = culprit.as_ref().filter(|_| matches!(cause, Cause::Scale { .. }));
        self.overflow =
            culprit_of_scale.map(|culprit| Overflow::new(culprit, scale, iteration, last));
        let repeated = self.overflow.as_ref().map_or(0, |overflow| overflow.repeated);
        let advice = String::new();
        let explanation = Explanation {
            iteration,
            scale,
            scale_now,
            cause,
            culprit,
            gradients,
            repeated,
            advice,
        };
        Ok(Some(Explanation { advice: explanation.advise(), ..explanation }))
    }
}

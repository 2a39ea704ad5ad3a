//! The trait through which a scaler steps an optimizer.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use tch::Tensor;

use crate::autocast::forgetting_casts;
use crate::capture;
use crate::error::{Error, OptimizerError, Result};
use crate::ffi::{self, OptimScale};
#[cfg(doc)]
use crate::optim::Optimizer;
use crate::panics;
use crate::variables::Parameters;

/// An optimizer that a [`GradScaler`](crate::GradScaler) can step. The counterpart of `torch.optim.Optimizer`, reduced
/// to what a scaler needs.
///
/// It is implemented for the fused [`Optimizer`] and for `tch::nn::Optimizer`. Implementing it for another optimizer
/// takes a few lines:
///
/// ```
/// use tch::Tensor;
/// use tch_amp::optim::{AmpOptimizer, Parameters, Step};
///
/// struct SignSgd { weights: Vec<Tensor>, lr: f64 }
///
/// impl AmpOptimizer for SignSgd {
///     fn parameters(&self) -> Parameters<'_> { self.weights.as_slice().into() }
///     fn update(&mut self, _step: &Step<'_>) -> tch_amp::Result<()> {
///         tch::no_grad(|| for w in &mut self.weights { let g = w.grad(); *w -= g.sign() * self.lr; });
///         Ok(())
///     }
/// }
/// ```
pub trait AmpOptimizer {
    /// Returns every tensor that [`update`](Self::update) may change, always in the same order. The scaler recognizes
    /// an optimizer by these tensors, so the optimizer itself may be moved.
    fn parameters(&self) -> Parameters<'_>;

    /// Updates the parameters from their gradients.
    ///
    /// The scaler calls it only for a step that is taken, with finite and unscaled gradients, and clears the autocast
    /// weight cache afterwards. (A disabled scaler calls it for every step, with the gradients as they are.)
    ///
    /// An optimizer that [takes scaled gradients](Self::takes_scaled_gradients) is called for every step that the host
    /// does not know to be skipped. Of the fields of `step` that are set, it divides the gradients by
    /// [`grad_scale`](Step::grad_scale), multiplies them by [`clip_factor`](Step::clip_factor), and changes nothing at
    /// all if [`found_inf`](Step::found_inf) is not zero.
    ///
    /// # Errors
    ///
    /// Any error, for instance an [`OptimizerError::Step`]; the scaler returns it to its caller.
    fn update(&mut self, step: &Step<'_>) -> Result<()>;

    /// Returns whether [`update`](Self::update) unscales, clips and skips by itself, on the device. The host then does
    /// not synchronize to find out whether a gradient is non-finite. Corresponds to `_step_supports_amp_scaling` of an
    /// optimizer in PyTorch. Defaults to `false`.
    fn takes_scaled_gradients(&self) -> bool {
        false
    }

    /// Returns whether the gradients of bf16 and fp16 parameters become f32 before they are unscaled in place, so that
    /// unscaling loses no precision. Meant for optimizers that update such parameters in f32. Defaults to `false`.
    fn wants_f32_gradients(&self) -> bool {
        false
    }

    /// Returns the tensors that the optimizer keeps for each parameter, by name, in the order of
    /// [`parameters`](Self::parameters). A [`Budget`](crate::insight::Budget) compares their dtypes, and by a
    /// `master_param` what the step did to a half-precision parameter. Defaults to none.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if libtorch fails.
    fn state_tensors(&mut self) -> Result<Vec<BTreeMap<String, Tensor>>> {
        Ok(Vec::new())
    }

    /// Returns the name of the parameter at `index` for messages, if it has one. The implementation must not use the
    /// scaler, which is borrowed during the call. Defaults to `None`.
    fn parameter_name(&self, _index: usize) -> Option<String> {
        None
    }
}

/// Drops the gradients of an optimizer's parameters.
pub(crate) fn drop_gradients(optimizer: &dyn AmpOptimizer) -> Result<()> {
    let parameters = optimizer.parameters();
    if optimizer.wants_f32_gradients() {
        ffi::gradients_drop(parameters.as_slice())
    } else {
        ffi::gradients_drop_narrow(parameters.as_slice())
    }
}

/// Takes the step of an optimizer, and forgets the casts of its weights.
pub(crate) fn take_step(optimizer: &mut dyn AmpOptimizer, step: &Step<'_>) -> Result<()> {
    #[cfg(feature = "insight")]
    watched::note(optimizer, step)?;
    forgetting_casts(|| optimizer.update(step))
}

/// Steps that something on the thread watches.
#[cfg(feature = "insight")]
pub(crate) mod watched {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::{AmpOptimizer, Step};
    use crate::error::Result;
    use crate::panics::Exchanged;

    /// Is told of each step before it is taken.
    type Watch = Rc<dyn Fn(&dyn AmpOptimizer, &Step<'_>) -> Result<()>>;

    thread_local! {
        static WATCH: RefCell<Option<Watch>> = const { RefCell::new(None) };
    }

    pub(super) fn note(optimizer: &dyn AmpOptimizer, step: &Step<'_>) -> Result<()> {
        let watch = WATCH.with_borrow(Option::clone);
        watch.map_or(Ok(()), |watch| watch(optimizer, step))
    }

    /// Runs `f`, and tells `watch` of the steps that the thread takes meanwhile.
    pub(crate) fn during<T>(watch: Watch, f: impl FnOnce() -> T) -> T {
        let _watched = Exchanged::new(&WATCH, Some(watch));
        f()
    }
}

impl AmpOptimizer for tch::nn::Optimizer {
    /// Returns the trainable variables of the `VarStore`, including those that were added after the optimizer was
    /// built: its step takes them up, too.
    fn parameters(&self) -> Parameters<'_> {
        self.trainable_variables().into()
    }

    fn update(&mut self, _step: &Step<'_>) -> Result<()> {
        let remedy = "its learning rate and its steps are the host's; use one of `tch_amp::optim`";
        capture::refuse("a step of one of tch's optimizers", remedy)?;
        // tch's own `step` has no fallible counterpart and panics with libtorch's message.
        catch_unwind(AssertUnwindSafe(|| self.step())).map_err(|panic| {
            Error::Optimizer(OptimizerError::Step(panics::into_message(panic).into()))
        })
    }
}

/// How a step has to treat the gradients: the scale to divide them by, the factor to clip them with, and whether the
/// step is skipped.
///
/// The default is an ordinary step with the gradients as they are. Only an optimizer that
/// [takes scaled gradients](crate::optim::AmpOptimizer::takes_scaled_gradients) is given anything else. In PyTorch the
/// scaler sets the attributes `grad_scale` and `found_inf` of the optimizer instead.
///
/// # Examples
///
/// ```
/// use tch::Tensor;
/// use tch_amp::optim::{AmpOptimizer, Sgd, Step};
///
/// let w = Tensor::from_slice(&[1f32]).set_requires_grad(true);
/// let mut opt = Sgd::default().build(&[w.shallow_clone()], 0.25)?;
/// let (scale, found_inf) = (Tensor::from(1024f32), Tensor::from(1f32));
/// (&w * &scale).sum(None).backward();
/// let step = Step::default().with_grad_scale(&scale);
/// opt.update(&step.with_found_inf(&found_inf))?;
/// assert_eq!(w.double_value(&[0]), 1.0);
/// opt.update(&step)?;
/// assert_eq!(w.double_value(&[0]), 0.75);
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Step<'a>(OptimScale<'a>);

impl<'a> Step<'a> {
    /// Sets the scale by which the gradients have to be divided: an f32 tensor with one element.
    #[must_use]
    pub fn with_grad_scale(self, grad_scale: &'a Tensor) -> Self {
        Self(OptimScale { grad_scale: Some(grad_scale), ..self.0 })
    }

    /// Sets the factor by which the unscaled gradients have to be multiplied: a tensor with one element that is at most
    /// 1.
    #[must_use]
    pub fn with_clip_factor(self, clip: &'a Tensor) -> Self {
        Self(OptimScale { clip: Some(clip), ..self.0 })
    }

    /// Sets the flag that tells whether the step has to be skipped: an f32 tensor with one element, 1 to skip the step
    /// and 0 to take it.
    #[must_use]
    pub fn with_found_inf(self, found_inf: &'a Tensor) -> Self {
        Self(OptimScale { found_inf: Some(found_inf), ..self.0 })
    }

    /// Returns the scale by which the gradients have to be divided, an f32 tensor with one element, or `None` if they
    /// are unscaled.
    pub fn grad_scale(&self) -> Option<&'a Tensor> {
        self.0.grad_scale
    }

    /// Returns the factor by which the unscaled gradients have to be multiplied, a tensor with one element that is at
    /// most 1, or `None` without clipping.
    pub fn clip_factor(&self) -> Option<&'a Tensor> {
        self.0.clip
    }

    /// Returns the flag that tells whether the step has to be skipped: an f32 tensor with one element that is 1 if a
    /// gradient is infinite or NaN, and otherwise 0. `None` if the host knows that all gradients are finite.
    pub fn found_inf(&self) -> Option<&'a Tensor> {
        self.0.found_inf
    }

    pub(crate) fn scale(&self) -> OptimScale<'a> {
        self.0
    }
}

//! Checks of derivatives against finite differences.

mod checked;
mod jacobian;

use std::borrow::Borrow;

use checked::{copies, first_gradients, outputs};
use tch::{Tensor, no_grad_guard, with_grad};

use self::checked::{Checked, check_inputs, requires_grad};
use self::jacobian::{Analytic, JacobianElement, numeric, unravel};
use crate::error::{BoxError, Error, FunctionError, Result, ensure};
use crate::ffi;
use crate::ffi::OutsideRegions;
use crate::function::Outputs;

/// Compares the gradients of `f` with finite differences, with PyTorch's default tolerances. [`GradCheck`] sets others.
/// The counterpart of `torch.autograd.gradcheck`.
///
/// `f` may be anything that autograd records, not only a [`Function`](crate::function::Function). It is called with
/// copies of the inputs. At least one input must require a gradient, and those that do must be f64, of any shape.
/// Synchronizes.
///
/// # Errors
///
/// - [`FunctionError::GradientMismatch`] for the first element whose two gradients differ, with both values.
/// - [`FunctionError::NotCheckable`] if an input or an output that requires a gradient is not f64, or if no input
///   requires one.
/// - [`FunctionError::NondeterministicBackward`] if the backward returns other gradients when it is run again.
/// - [`Error::InvalidArgument`] if an option of [`GradCheck`] is outside of its range.
/// - The errors of `f`: those of this crate unchanged, others as [`FunctionError::Forward`].
///
/// # Examples
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use tch_amp::{Error, function};
/// use tch_amp::function::{Function, FunctionError};
/// use tch_amp::gradcheck::gradcheck;
///
/// let x = Tensor::linspace(0.5, 2.0, 4, (Kind::Double, Device::Cpu)).set_requires_grad(true);
/// let square = |factor: f64| function(
///     |ctx, x| { ctx.save_for_backward(x); Ok(x[0].square()) },
///     move |ctx, g| { let [x] = ctx.saved_tensors()?; Ok(&g[0] * x * factor) },
/// );
/// gradcheck(|x| square(2.0).apply(x), &[&x])?;
/// let wrong = gradcheck(|x| square(3.0).apply(x), &[&x]);
/// assert!(matches!(wrong, Err(Error::Function(FunctionError::GradientMismatch { input: 0, .. }))));
/// # Ok::<(), tch_amp::Error>(())
/// ```
pub fn gradcheck<T, O, E>(
    f: impl Fn(&[&Tensor]) -> std::result::Result<O, E>,
    inputs: &[T],
) -> Result<()>
where
    T: Borrow<Tensor>,
    O: Outputs,
    E: Into<BoxError>,
{
    GradCheck::default().gradcheck(f, inputs)
}

/// Compares the second derivatives of `f` with finite differences: the derivatives of its backward with respect to the
/// inputs and to the gradients of the outputs, which are drawn at random. The counterpart of
/// `torch.autograd.gradgradcheck`. Synchronizes.
///
/// # Errors
///
/// The same as [`gradcheck`]. In [`FunctionError::GradientMismatch`], the inputs are those of `f` followed by the
/// gradients of its outputs, and the outputs are the gradients of those inputs of `f` that require one.
///
/// # Examples
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use tch_amp::function;
/// use tch_amp::gradcheck::gradgradcheck;
///
/// let x = Tensor::linspace(0.5, 2.0, 3, (Kind::Double, Device::Cpu)).set_requires_grad(true);
/// let square = |keeps_graph: bool| function(
///     |ctx, x| { ctx.save_for_backward(x); Ok(x[0].square()) },
///     move |ctx, g| {
///         let [x] = ctx.saved_tensors()?;
///         Ok(&g[0] * if keeps_graph { x } else { x.detach() } * 2.0)
///     },
/// );
/// gradgradcheck(|x| square(true).apply(x), &[&x])?;
/// assert!(gradgradcheck(|x| square(false).apply(x), &[&x]).is_err());
/// # Ok::<(), tch_amp::Error>(())
/// ```
pub fn gradgradcheck<T, O, E>(
    f: impl Fn(&[&Tensor]) -> std::result::Result<O, E>,
    inputs: &[T],
) -> Result<()>
where
    T: Borrow<Tensor>,
    O: Outputs,
    E: Into<BoxError>,
{
    GradCheck::default().gradgradcheck(f, inputs)
}

/// The step and the tolerances of [`gradcheck`].
///
/// A gradient passes if |analytic - numeric| ≤ `atol` + `rtol` · |numeric| for every element, where the numeric
/// gradient is (f(x + `eps`) - f(x - `eps`)) / (2 `eps`).
///
/// # Examples
///
/// ```
/// # use tch::{Device, Kind, Tensor};
/// use tch_amp::gradcheck::GradCheck;
///
/// let x = Tensor::ones([3], (Kind::Double, Device::Cpu)).set_requires_grad(true);
/// GradCheck { atol: 1e-8, rtol: 1e-7, ..Default::default() }.gradcheck(|x| x[0].f_tanh(), &[x])?;
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradCheck {
    /// The step of the finite differences, finite and more than 0. Defaults to 1e-6.
    pub eps: f64,
    /// The absolute tolerance, finite and at least 0. Defaults to 1e-5.
    pub atol: f64,
    /// The relative tolerance, finite and at least 0. Defaults to 1e-3.
    pub rtol: f64,
}

impl Default for GradCheck {
    fn default() -> Self {
        Self { eps: 1e-6, atol: 1e-5, rtol: 1e-3 }
    }
}

impl GradCheck {
    /// Compares the gradients of `f` with finite differences; see [`gradcheck`].
    ///
    /// # Errors
    ///
    /// The same as [`gradcheck`].
    pub fn gradcheck<T, O, E>(
        &self,
        f: impl Fn(&[&Tensor]) -> std::result::Result<O, E>,
        inputs: &[T],
    ) -> Result<()>
    where
        T: Borrow<Tensor>,
        O: Outputs,
        E: Into<BoxError>,
    {
        self.check_tolerances()?;
        with_gradients(|| self.check(&|inputs| outputs(&f, inputs), &copies(inputs)?))
    }

    /// Compares the second derivatives of `f` with finite differences; see [`gradgradcheck`].
    ///
    /// # Errors
    ///
    /// The same as [`gradgradcheck`].
    pub fn gradgradcheck<T, O, E>(
        &self,
        f: impl Fn(&[&Tensor]) -> std::result::Result<O, E>,
        inputs: &[T],
    ) -> Result<()>
    where
        T: Borrow<Tensor>,
        O: Outputs,
        E: Into<BoxError>,
    {
        self.check_tolerances()?;
        with_gradients(|| {
            let f = |inputs: &[&Tensor]| outputs(&f, inputs);
            let mut inputs = copies(inputs)?;
            let count = inputs.len();
            let outputs = f(&inputs.iter().collect::<Vec<_>>())?;
            for output in outputs.iter().filter(|output| requires_grad(output)) {
                let _own = OutsideRegions::enter();
                let grad = output.detach().f_randn_like()?;
                inputs.push(grad.f_set_requires_grad(true)?);
            }
            self.check(&|all| first_gradients(&f, &all[..count], &all[count..]), &inputs)
        })
    }
}

/// Runs `f` with the grad mode on, and restores the mode when `f` returns or panics.
fn with_gradients<T>(f: impl FnOnce() -> T) -> T {
    let _restore = no_grad_guard();
    with_grad(f)
}

impl GradCheck {
    /// Refuses tolerances with which every gradient would pass, or none.
    pub(super) fn check_tolerances(&self) -> Result<()> {
        let Self { eps, atol, rtol } = *self;
        ensure("eps", eps, eps.is_finite() && eps > 0.0, "finite and more than 0")?;
        ensure("atol", atol, atol.is_finite() && atol >= 0.0, "finite and at least 0")?;
        ensure("rtol", rtol, rtol.is_finite() && rtol >= 0.0, "finite and at least 0")
    }

    /// Compares the gradients with respect to every element of the inputs that require one.
    pub(super) fn check(&self, f: Checked<'_>, inputs: &[Tensor]) -> Result<()> {
        check_inputs(inputs)?;
        let refs: Vec<&Tensor> = inputs.iter().collect();
        let analytic = Analytic::new(f, &refs)?;
        for (input, tensor) in inputs.iter().enumerate().filter(|(_, input)| requires_grad(input)) {
            for element in 0..ffi::numel(tensor) {
                let input_index = unravel(element, &tensor.size());
                let numeric = numeric(f, &refs, input, &input_index, self.eps)?;
                if let Some(found) = self.first_difference(&analytic, &numeric, input, element) {
                    let size = analytic.size(found.place.output);
                    return Err(found.into_error(input_index, size));
                }
            }
        }
        Ok(())
    }

    /// Finds the first place where the gradients with respect to an element of an input differ. Places without an
    /// analytic gradient are skipped.
    fn first_difference(
        &self,
        analytic: &Analytic,
        numeric: &[Vec<f64>],
        input: usize,
        element: usize,
    ) -> Option<Difference> {
        numeric.iter().enumerate().find_map(|(output, slopes)| {
            slopes.iter().enumerate().find_map(|(row, &numeric)| {
                let place = JacobianElement { input, element, output, row };
                let analytic = analytic.gradient(place)?;
                let close = (analytic - numeric).abs() <= self.atol + self.rtol * numeric.abs();
                // Not `>`, which a NaN would pass.
                (!close).then_some(Difference { place, analytic, numeric })
            })
        })
    }
}

/// Two gradients that should be the same.
struct Difference {
    place: JacobianElement,
    analytic: f64,
    numeric: f64,
}

impl Difference {
    fn into_error(self, input_index: Vec<i64>, output_size: &[i64]) -> Error {
        let Self { place: JacobianElement { input, output, row, .. }, analytic, numeric } = self;
        let output_index = unravel(row, output_size);
        Error::Function(FunctionError::GradientMismatch {
            input,
            input_index,
            output,
            output_index,
            analytic,
            numeric,
        })
    }
}

//! Derivatives against finite differences.

mod checked;
mod compare;
mod jacobian;

use std::borrow::Borrow;

use tch::{Tensor, no_grad_guard, with_grad};

use crate::builder::builder;
#[cfg(doc)]
use crate::error::FunctionError;
use crate::error::{BoxError, Result};
use crate::function::Outputs;

use checked::{copies, first_gradients, outputs, requires_grad};

/// Checks the gradients of `f` against finite differences, with PyTorch's tolerances; [`GradCheck`] has them as
/// options. The twin of `torch.autograd.gradcheck`.
///
/// `f` may be anything that autograd records, not only a [`Function`](crate::function::Function), and gets copies of the inputs.
/// At least one of them requires a gradient, and those that do are f64, of any shape. Waits for the device.
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use tch_amp::{Error, function};
/// use tch_amp::function::Function;
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
///
/// # Errors
///
/// [`FunctionError::GradientMismatch`] with the first element whose two gradients differ, and both;
/// [`FunctionError::NotCheckable`] for inputs or outputs that are not f64 and for inputs of which
/// none requires a gradient; [`FunctionError::NondeterministicBackward`] for a backward
/// that answers differently when it is run again; [`Error::InvalidArgument`](crate::Error::InvalidArgument) for options of
/// [`GradCheck`] that are outside of their ranges; and what `f` itself fails with.
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

/// Checks the second derivatives of `f`: those of its backward, with respect to the inputs and to the gradients of the
/// outputs, which are drawn at random. The twin of `torch.autograd.gradgradcheck`. Waits for the device.
///
/// # Errors
///
/// As [`gradcheck`]; the inputs that [`FunctionError::GradientMismatch`] counts are those of `f` and after
/// them the gradients of its outputs, and the outputs are the gradients of its inputs that require one.
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

/// The tolerances of [`gradcheck`]: a gradient passes if |analytic - numeric| ≤ `atol` + `rtol` · |numeric|, where the
/// numeric one is (f(x + `eps`) - f(x - `eps`)) / (2 `eps`), element by element.
///
/// ```
/// # use tch::{Device, Kind, Tensor};
/// use tch_amp::gradcheck::GradCheck;
///
/// let x = Tensor::ones([3], (Kind::Double, Device::Cpu)).set_requires_grad(true);
/// GradCheck::default().atol(1e-8).rtol(1e-7).gradcheck(|x| x[0].f_tanh(), &[x])?;
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct GradCheck {
    /// The step of the finite difference, finite and more than 0. Defaults to 1e-6.
    pub eps: f64,
    /// The absolute tolerance, finite and at least 0. Defaults to 1e-5.
    pub atol: f64,
    /// The relative tolerance, finite and at least 0. Defaults to 1e-3.
    pub rtol: f64,
}

builder!(GradCheck { eps: f64, atol: f64, rtol: f64 });

impl Default for GradCheck {
    fn default() -> Self {
        Self { eps: 1e-6, atol: 1e-5, rtol: 1e-3 }
    }
}

impl GradCheck {
    /// Checks the gradients of `f`; see [`gradcheck`].
    ///
    /// # Errors
    ///
    /// As [`gradcheck`].
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

    /// Checks the second derivatives of `f`; see [`gradgradcheck`].
    ///
    /// # Errors
    ///
    /// As [`gradgradcheck`].
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
                let grad = output.detach().f_randn_like()?;
                inputs.push(grad.f_set_requires_grad(true)?);
            }
            self.check(&|all| first_gradients(&f, &all[..count], &all[count..]), &inputs)
        })
    }
}

/// Runs `f` with gradients on; the mode is as before when it returns or panics.
fn with_gradients<T>(f: impl FnOnce() -> T) -> T {
    let _restore = no_grad_guard();
    with_grad(f)
}

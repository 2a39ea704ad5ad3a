//! Derivatives against finite differences.

#![forbid(unsafe_code)]

mod jacobian;

use std::borrow::Borrow;

use tch::{Kind, Tensor, no_grad_guard, with_grad};

use crate::error::{BoxError, Error, Result, ensure};
use crate::function::Outputs;

use jacobian::{Analytic, Checked, numeric, requires_grad, unravel};

/// Checks the gradients of `f` by finite differences with PyTorch's tolerances; [`GradCheck`] has them as options. The
/// twin of `torch.autograd.gradcheck`.
///
/// `f` may be anything that autograd records, not only a [`Function`](crate::Function). The inputs are f64 where they
/// require a gradient, at least one of them does, and `f` gets copies of them. Waits for the device.
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use tch_amp::{Error, Function, function, gradcheck};
///
/// let x = Tensor::linspace(0.5, 2.0, 4, (Kind::Double, Device::Cpu)).set_requires_grad(true);
/// let square = |factor: f64| function(
///     |ctx, x| { ctx.save_for_backward(x); Ok(x[0].square()) },
///     move |ctx, g| { let [x] = ctx.saved_tensors()?; Ok(&g[0] * x * factor) },
/// );
/// gradcheck(|x| square(2.0).apply(x), &[&x])?;
/// let wrong = gradcheck(|x| square(3.0).apply(x), &[&x]);
/// assert!(matches!(wrong, Err(Error::GradCheck { input: 0, .. })));
/// # Ok::<(), tch_amp::Error>(())
/// ```
///
/// # Errors
///
/// [`Error::GradCheck`] with the first element whose two gradients differ, and both; [`Error::NotCheckable`] for inputs
/// or outputs that are not f64 and for inputs of which none requires a gradient; [`Error::NondeterministicBackward`] for
/// a backward that answers differently when it is run again; [`Error::InvalidValue`] for options of [`GradCheck`] that are
/// outside of their ranges; and what `f` itself fails with.
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

/// Checks the second derivatives of `f`: the gradients of its backward, by the inputs and by the gradients of the
/// outputs, which are drawn at random. The twin of `torch.autograd.gradgradcheck`. Waits for the device.
///
/// # Errors
///
/// As [`gradcheck`]; the inputs that [`Error::GradCheck`] counts are those of `f` and after them the gradients of its
/// outputs, and the outputs are the gradients of its inputs that require one.
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
/// use tch_amp::GradCheck;
///
/// let x = Tensor::ones([3], (Kind::Double, Device::Cpu)).set_requires_grad(true);
/// GradCheck { atol: 1e-8, rtol: 1e-7, ..Default::default() }.gradcheck(|x| x[0].f_tanh(), &[x])?;
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GradCheck {
    /// The step of the finite difference, finite and more than 0. Defaults to 1e-6.
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
        enabled(|| self.check(&|inputs| outputs(&f, inputs), &copies(inputs)?))
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
        enabled(|| {
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

    /// With other numbers every gradient would pass, or none.
    fn check_tolerances(&self) -> Result<()> {
        let Self { eps, atol, rtol } = *self;
        ensure("eps", eps, eps.is_finite() && eps > 0.0, "finite and more than 0")?;
        ensure("atol", atol, atol.is_finite() && atol >= 0.0, "finite and at least 0")?;
        ensure("rtol", rtol, rtol.is_finite() && rtol >= 0.0, "finite and at least 0")
    }

    fn check(&self, f: Checked<'_>, inputs: &[Tensor]) -> Result<()> {
        check_inputs(inputs)?;
        let refs: Vec<&Tensor> = inputs.iter().collect();
        let analytic = Analytic::new(f, &refs)?;
        for (input, tensor) in inputs.iter().enumerate().filter(|(_, input)| requires_grad(input)) {
            for element in 0..tensor.numel() {
                let input_index = unravel(element, &tensor.size());
                let numeric = numeric(f, &refs, input, &input_index, self.eps)?;
                for (output, slopes) in numeric.iter().enumerate() {
                    let gradient = |row| analytic.gradient(output, row, input, element);
                    let Some(row) = self.first_difference(gradient, slopes) else { continue };
                    return Err(Error::GradCheck {
                        input,
                        input_index,
                        output,
                        output_index: unravel(row, analytic.size(output)),
                        analytic: gradient(row).unwrap_or_default(),
                        numeric: slopes[row],
                    });
                }
            }
        }
        Ok(())
    }

    /// The first place where the gradients differ; those without an analytic one are not looked at.
    fn first_difference(
        &self,
        analytic: impl Fn(usize) -> Option<f64>,
        numeric: &[f64],
    ) -> Option<usize> {
        let is_far = |(row, numeric): (usize, &f64)| {
            analytic(row).is_some_and(|analytic| {
                let close = (analytic - numeric).abs() <= self.atol + self.rtol * numeric.abs();
                !close // and not `>`, which a NaN would pass
            })
        };
        numeric.iter().enumerate().position(is_far)
    }
}

/// Runs `f` with gradients on; the mode is as before when it returns or panics.
fn enabled<T>(f: impl FnOnce() -> T) -> T {
    let _restore = no_grad_guard();
    with_grad(f)
}

/// The gradients of the inputs that require one, as a function that can be differentiated once more.
fn first_gradients(
    f: Checked<'_>,
    inputs: &[&Tensor],
    grad_outputs: &[&Tensor],
) -> Result<Vec<Tensor>> {
    let outputs = f(inputs)?;
    let outputs = outputs.iter().filter(|output| requires_grad(output));
    let dot = |(output, grad): (&Tensor, &&Tensor)| output.f_mul(grad)?.f_sum(None);
    let losses = outputs.zip(grad_outputs).map(dot).collect::<std::result::Result<Vec<_>, _>>()?;
    let wanted: Vec<&Tensor> = inputs.iter().copied().filter(|t| requires_grad(t)).collect();
    let found = Tensor::f_run_backward(&losses, &wanted, true, true)?;
    let gradient = |(gradient, input): (Tensor, &&Tensor)| {
        if gradient.defined() { Ok(gradient) } else { Ok(input.detach().f_zeros_like()?) }
    };
    found.into_iter().zip(&wanted).map(gradient).collect()
}

/// What `f` returns, as a list; its own error where it is one of ours.
fn outputs<O, E>(
    f: &impl Fn(&[&Tensor]) -> std::result::Result<O, E>,
    inputs: &[&Tensor],
) -> Result<Vec<Tensor>>
where
    O: Outputs,
    E: Into<BoxError>,
{
    let ours = |error: E| match error.into().downcast() {
        Ok(ours) => *ours,
        Err(cause) => Error::Function { name: "the checked function".to_owned(), cause },
    };
    let mut outputs = f(inputs).map_err(ours)?;
    let outputs: Vec<Tensor> = outputs.as_mut_slice().iter().map(Tensor::shallow_clone).collect();
    let wrong = outputs.iter().position(|t| requires_grad(t) && t.kind() != Kind::Double);
    match wrong {
        Some(output) => {
            let kind = outputs[output].kind();
            let problem = format!("output {output} is {kind:?}; finite differences need f64");
            Err(Error::NotCheckable { problem })
        }
        None => Ok(outputs),
    }
}

/// Leaves with the values, layouts and requirements of the inputs.
fn copies<T: Borrow<Tensor>>(inputs: &[T]) -> Result<Vec<Tensor>> {
    let copy = |input: &T| {
        let input = input.borrow();
        if !input.defined() {
            return Ok(input.shallow_clone());
        }
        Ok(input.f_detach_copy()?.f_set_requires_grad(input.requires_grad())?)
    };
    inputs.iter().map(copy).collect()
}

fn check_inputs(inputs: &[Tensor]) -> Result<()> {
    let mut wanted = inputs.iter().enumerate().filter(|(_, input)| requires_grad(input)).peekable();
    if wanted.peek().is_none() {
        let problem = "none of the inputs requires one; call set_requires_grad(true)".to_owned();
        return Err(Error::NotCheckable { problem });
    }
    if let Some((input, tensor)) = wanted.find(|(_, tensor)| tensor.kind() != Kind::Double) {
        let kind = tensor.kind();
        let problem = format!("input {input} is {kind:?}; finite differences need f64");
        return Err(Error::NotCheckable { problem });
    }
    Ok(())
}

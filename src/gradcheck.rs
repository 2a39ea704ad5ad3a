//! Derivatives against finite differences.

#![forbid(unsafe_code)]

use std::borrow::Borrow;

use tch::{Device, Kind, Tensor, no_grad, no_grad_guard, with_grad};

use crate::error::{Error, Result};
use crate::function::Outputs;

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
/// [`Error::GradCheck`] with the first element whose two gradients differ, and both; [`Error::GradCheckInputs`] for
/// inputs or outputs that are not f64, inputs of which none requires a gradient, and a backward that answers
/// differently when it is run again; and what `f` itself fails with.
pub fn gradcheck<T, O, E>(
    f: impl Fn(&[&Tensor]) -> std::result::Result<O, E>,
    inputs: &[T],
) -> Result<()>
where
    T: Borrow<Tensor>,
    O: Outputs,
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
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
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
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
    /// The step of the finite difference. Defaults to 1e-6.
    pub eps: f64,
    /// The absolute tolerance. Defaults to 1e-5.
    pub atol: f64,
    /// The relative tolerance. Defaults to 1e-3.
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
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
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
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
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

    fn check(
        &self,
        f: &dyn Fn(&[&Tensor]) -> Result<Vec<Tensor>>,
        inputs: &[Tensor],
    ) -> Result<()> {
        check_inputs(inputs)?;
        let refs: Vec<&Tensor> = inputs.iter().collect();
        let analytic = analytic(f, &refs)?;
        for (input, tensor) in inputs.iter().enumerate().filter(|(_, input)| requires_grad(input)) {
            for element in 0..tensor.numel() {
                let index = unravel(element, &tensor.size());
                let numeric = self.numeric(f, &refs, input, &index)?;
                self.compare(&analytic, &numeric, input, element, index)?;
            }
        }
        Ok(())
    }

    /// The derivatives of every element of every output by one element of one input.
    fn numeric(
        &self,
        f: &dyn Fn(&[&Tensor]) -> Result<Vec<Tensor>>,
        inputs: &[&Tensor],
        input: usize,
        index: &[i64],
    ) -> Result<Vec<Vec<f64>>> {
        let element = index.iter().try_fold(inputs[input].detach(), |t, i| t.f_select(0, *i))?;
        let value = element.f_double_value(&[])?;
        let set = |value: f64| no_grad(|| element.shallow_clone().f_fill_(value)).map(drop);
        let at = |value: f64| {
            set(value)?;
            f(inputs)?.iter().map(values).collect::<Result<Vec<_>>>()
        };
        let (after, before) = (at(value + self.eps), at(value - self.eps));
        set(value)?;
        let slope = |(after, before): (f64, f64)| (after - before) / (2.0 * self.eps);
        let slopes =
            |(after, before): (Vec<f64>, _)| after.into_iter().zip(before).map(slope).collect();
        Ok(after?.into_iter().zip(before?).map(slopes).collect())
    }

    fn compare(
        &self,
        analytic: &[Output],
        numeric: &[Vec<f64>],
        input: usize,
        element: usize,
        index: Vec<i64>,
    ) -> Result<()> {
        for (output, (known, numeric)) in analytic.iter().zip(numeric).enumerate() {
            for (row, numeric) in numeric.iter().enumerate() {
                let analytic = known.gradient(row, input, element);
                // Written so that a NaN does not pass.
                let close = (analytic - numeric).abs() <= self.atol + self.rtol * numeric.abs();
                if !close {
                    let output_index = unravel(row, &known.size);
                    let numeric = *numeric;
                    return Err(Error::GradCheck {
                        input,
                        index,
                        output,
                        output_index,
                        analytic,
                        numeric,
                    });
                }
            }
        }
        Ok(())
    }
}

/// Runs `f` with gradients on; the mode is as before when it returns or panics.
fn enabled<T>(f: impl FnOnce() -> T) -> T {
    let _restore = no_grad_guard();
    with_grad(f)
}

/// The analytic gradients of one output.
struct Output {
    size: Vec<i64>,
    /// For each of its elements and each input, the gradient; none where there is no dependence.
    gradients: Vec<Vec<Option<Vec<f64>>>>,
}

impl Output {
    fn gradient(&self, row: usize, input: usize, element: usize) -> f64 {
        let gradient = self.gradients.get(row).and_then(|inputs| inputs[input].as_ref());
        gradient.map_or(0.0, |gradient| gradient[element])
    }
}

/// The gradients of every output by backward, which must give the same twice.
fn analytic(
    f: &dyn Fn(&[&Tensor]) -> Result<Vec<Tensor>>,
    inputs: &[&Tensor],
) -> Result<Vec<Output>> {
    let outputs = f(inputs)?;
    let all = |output: &Tensor| {
        let rows = if requires_grad(output) { output.numel() } else { 0 };
        let gradients = (0..rows).map(|row| gradients(output, row, inputs));
        Ok(Output { size: output.size(), gradients: gradients.collect::<Result<_>>()? })
    };
    let first: Vec<Output> = outputs.iter().map(all).collect::<Result<_>>()?;
    let again: Vec<Output> = outputs.iter().map(all).collect::<Result<_>>()?;
    for (output, (first, again)) in first.iter().zip(&again).enumerate() {
        let bits = |output: &Output| {
            let inputs = output.gradients.iter().flatten().flatten().flatten();
            inputs.map(|value| value.to_bits()).collect::<Vec<_>>()
        };
        if bits(first) != bits(again) {
            let problem =
                format!("backward answered differently when it was run again for output {output}");
            return Err(Error::GradCheckInputs(problem));
        }
    }
    Ok(first)
}

/// The gradients of one element of an output by all inputs.
fn gradients(output: &Tensor, row: usize, inputs: &[&Tensor]) -> Result<Vec<Option<Vec<f64>>>> {
    let element = output.f_reshape([-1])?.f_select(0, as_index(row))?;
    let wanted: Vec<&Tensor> = inputs.iter().copied().filter(|t| requires_grad(t)).collect();
    let mut found = Tensor::f_run_backward(&[element], &wanted, true, false)?.into_iter();
    let gradient = |input: &&Tensor| {
        let gradient = requires_grad(input).then(|| found.next()).flatten();
        gradient.filter(Tensor::defined).map(|gradient| values(&gradient)).transpose()
    };
    inputs.iter().map(gradient).collect()
}

/// The gradients of the inputs that require one, as a function that can be differentiated once more.
fn first_gradients(
    f: &dyn Fn(&[&Tensor]) -> Result<Vec<Tensor>>,
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
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let ours = |error: E| match error.into().downcast() {
        Ok(ours) => *ours,
        Err(source) => Error::Function { name: "the checked function".to_owned(), source },
    };
    let outputs = f(inputs).map_err(ours)?.into_vec();
    let wrong = outputs.iter().position(|t| requires_grad(t) && t.kind() != Kind::Double);
    match wrong {
        Some(output) => {
            let kind = outputs[output].kind();
            let problem = format!("output {output} is {kind:?}; finite differences need f64");
            Err(Error::GradCheckInputs(problem))
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
        return Err(Error::GradCheckInputs(problem));
    }
    if let Some((input, tensor)) = wanted.find(|(_, tensor)| tensor.kind() != Kind::Double) {
        let kind = tensor.kind();
        let problem = format!("input {input} is {kind:?}; finite differences need f64");
        return Err(Error::GradCheckInputs(problem));
    }
    Ok(())
}

fn requires_grad(tensor: &Tensor) -> bool {
    tensor.defined() && tensor.requires_grad()
}

/// The elements in row-major order.
fn values(tensor: &Tensor) -> Result<Vec<f64>> {
    if !tensor.defined() {
        return Ok(Vec::new());
    }
    let flat = tensor.detach().f_to_device(Device::Cpu)?.f_to_kind(Kind::Double)?;
    Ok(Vec::try_from(flat.f_reshape([-1])?)?)
}

/// The index of the element with this number in row-major order.
fn unravel(mut element: usize, size: &[i64]) -> Vec<i64> {
    let mut index = vec![0; size.len()];
    for (place, length) in index.iter_mut().zip(size).rev() {
        let length = usize::try_from(*length).unwrap_or(1).max(1);
        *place = as_index(element % length);
        element /= length;
    }
    index
}

fn as_index(element: usize) -> i64 {
    // An element of a tensor: libtorch counts them in i64 itself.
    i64::try_from(element).unwrap_or(i64::MAX)
}

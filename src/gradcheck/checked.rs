//! The function that is checked and its inputs, as lists of tensors, and the conditions on them.

use std::borrow::Borrow;

use tch::{Kind, Tensor};

use crate::error::{BoxError, Error, FunctionError, Result};
use crate::ffi::OutsideRegions;
use crate::function::{GradConfig, Outputs, grad};

/// A function whose derivatives are checked.
pub(super) type Checked<'a> = &'a dyn Fn(&[&Tensor]) -> Result<Vec<Tensor>>;

/// The gradients of the inputs that require one, as a function that can be differentiated once more.
pub(super) fn first_gradients(
    f: Checked<'_>,
    inputs: &[&Tensor],
    grad_outputs: &[&Tensor],
) -> Result<Vec<Tensor>> {
    let outputs = f(inputs)?;
    let outputs = outputs.iter().filter(|output| requires_grad(output));
    let dot = |(output, grad): (&Tensor, &&Tensor)| {
        let _own = OutsideRegions::enter();
        output.f_mul(grad)?.f_sum(None)
    };
    let losses = outputs.zip(grad_outputs).map(dot).collect::<std::result::Result<Vec<_>, _>>()?;
    let wanted: Vec<&Tensor> = inputs.iter().copied().filter(|t| requires_grad(t)).collect();
    let config = GradConfig { create_graph: true, allow_unused: true, ..Default::default() };
    let found = match losses.is_empty() || wanted.is_empty() {
        true => wanted.iter().map(|_| None).collect(),
        false => grad(&losses, &wanted, &config)?,
    };
    let gradient = |(gradient, input): (Option<Tensor>, &&Tensor)| {
        let _own = OutsideRegions::enter();
        gradient.map_or_else(|| Ok(input.detach().f_zeros_like()?), Ok)
    };
    found.into_iter().zip(&wanted).map(gradient).collect()
}

/// Runs `f` and returns its outputs as a list. An error of this crate is returned as it is.
pub(super) fn outputs<O, E>(
    f: &impl Fn(&[&Tensor]) -> std::result::Result<O, E>,
    inputs: &[&Tensor],
) -> Result<Vec<Tensor>>
where
    O: Outputs,
    E: Into<BoxError>,
{
    let ours = |error: E| match error.into().downcast() {
        Ok(ours) => *ours,
        Err(cause) => Error::Function(FunctionError::Forward {
            name: "the checked function".to_owned(),
            cause,
        }),
    };
    let mut outputs = f(inputs).map_err(ours)?;
    let outputs: Vec<Tensor> = outputs.as_mut_slice().iter().map(Tensor::shallow_clone).collect();
    let wrong = outputs.iter().position(|t| requires_grad(t) && t.kind() != Kind::Double);
    match wrong {
        Some(output) => {
            let kind = outputs[output].kind();
            let problem = format!("output {output} is {kind:?}; finite differences need f64");
            Err(Error::Function(FunctionError::NotCheckable { problem }))
        }
        None => Ok(outputs),
    }
}

/// Copies the inputs into leaves with the same layouts and `requires_grad`.
pub(super) fn copies<T: Borrow<Tensor>>(inputs: &[T]) -> Result<Vec<Tensor>> {
    let _own = OutsideRegions::enter();
    let copy = |input: &T| {
        let input = input.borrow();
        if !input.defined() {
            return Ok(input.shallow_clone());
        }
        Ok(input.f_detach_copy()?.f_set_requires_grad(input.requires_grad())?)
    };
    inputs.iter().map(copy).collect()
}

pub(super) fn check_inputs(inputs: &[Tensor]) -> Result<()> {
    let mut wanted = inputs.iter().enumerate().filter(|(_, input)| requires_grad(input)).peekable();
    if wanted.peek().is_none() {
        let problem = "none of the inputs requires one; call set_requires_grad(true)".to_owned();
        return Err(Error::Function(FunctionError::NotCheckable { problem }));
    }
    if let Some((input, tensor)) = wanted.find(|(_, tensor)| tensor.kind() != Kind::Double) {
        let kind = tensor.kind();
        let problem = format!("input {input} is {kind:?}; finite differences need f64");
        return Err(Error::Function(FunctionError::NotCheckable { problem }));
    }
    Ok(())
}

pub(super) fn requires_grad(tensor: &Tensor) -> bool {
    tensor.defined() && tensor.requires_grad()
}

//! The derivatives of a function's outputs with respect to its inputs, by backward and by finite differences.
//!
//! Backward gives the derivatives of one element of an output with respect to all inputs, a row of the Jacobian. The
//! central difference (f(x + eps) - f(x - eps)) / (2 eps) gives those of all outputs with respect to one element of an
//! input, a column.

use tch::{Device, Kind, Tensor};

use crate::error::{Error, FunctionError, Result};
use crate::ffi::{self, OutsideRegions};
use crate::function::{GradConfig, grad};

use super::checked::{Checked, requires_grad};

/// The place of one derivative: that of an element of an output with respect to an element of an input, both counted in
/// row-major order.
#[derive(Clone, Copy)]
pub(super) struct JacobianElement {
    pub(super) input: usize,
    pub(super) element: usize,
    pub(super) output: usize,
    pub(super) row: usize,
}

/// The gradients of every output, computed by backward.
pub(super) struct Analytic {
    outputs: Vec<Output>,
}

struct Output {
    size: Vec<i64>,
    /// The gradient of each of its elements with respect to each input; `None` if it does not depend on the input.
    gradients: Vec<Vec<Option<Vec<f64>>>>,
    /// Whether it is compared. An output that takes no part in autograd is not, because it may depend on the inputs all
    /// the same, unless no output takes part.
    is_checked: bool,
}

impl Analytic {
    /// Runs backward twice for each element of each output. Both runs must return the same bits.
    pub(super) fn new(f: Checked<'_>, inputs: &[&Tensor]) -> Result<Self> {
        let outputs = f(inputs)?;
        let none = !outputs.iter().any(requires_grad);
        let all = |output: &Tensor| {
            let rows = if requires_grad(output) { ffi::numel(output) } else { 0 };
            let gradients = (0..rows).map(|row| gradients(output, row, inputs));
            let is_floating = output.defined() && output.is_floating_point();
            let is_checked = is_floating && (none || requires_grad(output));
            let size = if output.defined() { output.size() } else { Vec::new() };
            Ok(Output { size, gradients: gradients.collect::<Result<_>>()?, is_checked })
        };
        let first: Vec<Output> = outputs.iter().map(all).collect::<Result<_>>()?;
        let again: Vec<Output> = outputs.iter().map(all).collect::<Result<_>>()?;
        for (output, (first, again)) in first.iter().zip(&again).enumerate() {
            if first.bits() != again.bits() {
                return Err(Error::Function(FunctionError::NondeterministicBackward { output }));
            }
        }
        Ok(Self { outputs: first })
    }

    /// Returns the gradient at a place; `None` if it is not to be compared.
    pub(super) fn gradient(&self, place: JacobianElement) -> Option<f64> {
        let output = &self.outputs[place.output];
        let known = output.gradients.get(place.row).and_then(|inputs| inputs[place.input].as_ref());
        output.is_checked.then(|| known.map_or(0.0, |gradient| gradient[place.element]))
    }

    pub(super) fn size(&self, output: usize) -> &[i64] {
        &self.outputs[output].size
    }
}

impl Output {
    fn bits(&self) -> Vec<u64> {
        let values = self.gradients.iter().flatten().flatten().flatten();
        values.map(|value| value.to_bits()).collect()
    }
}

/// Computes the gradients of one element of an output with respect to all inputs.
fn gradients(output: &Tensor, row: usize, inputs: &[&Tensor]) -> Result<Vec<Option<Vec<f64>>>> {
    let element = {
        let _own = OutsideRegions::enter();
        output.f_reshape([-1])?.f_select(0, as_index(row))?
    };
    let wanted: Vec<&Tensor> = inputs.iter().copied().filter(|t| requires_grad(t)).collect();
    let config = GradConfig { retain_graph: Some(true), allow_unused: true, ..Default::default() };
    let mut found = grad(&[element], &wanted, &config)?.into_iter();
    let gradient = |input: &&Tensor| {
        let gradient = requires_grad(input).then(|| found.next()).flatten().flatten();
        gradient.map(|gradient| values(&gradient)).transpose()
    };
    inputs.iter().map(gradient).collect()
}

/// Computes the derivatives of every element of every output with respect to one element of one input, by central
/// differences.
pub(super) fn numeric(
    f: Checked<'_>,
    inputs: &[&Tensor],
    input: usize,
    index: &[i64],
    eps: f64,
) -> Result<Vec<Vec<f64>>> {
    let element = index.iter().try_fold(inputs[input].detach(), |t, i| t.f_select(0, *i))?;
    let value = {
        let _own = OutsideRegions::enter();
        element.f_double_value(&[])?
    };
    let set = |value: f64| ffi::number_set(&element, value);
    let at = |value: f64| {
        set(value)?;
        f(inputs)?.iter().map(values).collect::<Result<Vec<_>>>()
    };
    let (after, before) = (at(value + eps), at(value - eps));
    set(value)?;
    let slope = |(after, before): (f64, f64)| (after - before) / (2.0 * eps);
    let slopes =
        |(after, before): (Vec<f64>, _)| after.into_iter().zip(before).map(slope).collect();
    Ok(after?.into_iter().zip(before?).map(slopes).collect())
}

/// Returns the elements in row-major order, as f64.
fn values(tensor: &Tensor) -> Result<Vec<f64>> {
    let _own = OutsideRegions::enter();
    if !tensor.defined() {
        return Ok(Vec::new());
    }
    let flat = tensor.detach().f_to_device(Device::Cpu)?.f_to_kind(Kind::Double)?;
    Ok(Vec::try_from(flat.f_reshape([-1])?)?)
}

/// Returns the index of the element with this number in row-major order.
pub(super) fn unravel(mut element: usize, size: &[i64]) -> Vec<i64> {
    let mut index = vec![0; size.len()];
    for (place, length) in index.iter_mut().zip(size).rev() {
        let length = usize::try_from(*length).unwrap_or(1).max(1);
        *place = as_index(element % length);
        element /= length;
    }
    index
}

fn as_index(element: usize) -> i64 {
    // It always fits: libtorch counts elements in i64 itself.
    i64::try_from(element).unwrap_or(i64::MAX)
}

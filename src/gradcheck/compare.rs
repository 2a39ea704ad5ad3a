//! The comparison of the two gradients.

use tch::Tensor;

use crate::error::{Error, FunctionError, Result, ensure};
use crate::ffi;

use super::GradCheck;
use super::checked::{Checked, check_inputs, requires_grad};
use super::jacobian::{Analytic, JacobianElement, numeric, unravel};

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

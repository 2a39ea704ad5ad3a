//! Finding the gradients that are infinite or NaN.

use std::collections::HashSet;

use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::ffi::OutsideRegions;
use crate::gradients::Gradients;

/// A parameter whose gradient has infinite or NaN elements.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NonFiniteGradient {
    /// The parameter: its name if it is known, or else its index, and its shape.
    pub parameter: String,
    /// The number of infinite elements.
    pub infinite: i64,
    /// The number of NaN elements.
    pub nan: i64,
}

impl std::fmt::Display for NonFiniteGradient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { parameter, infinite, nan } = self;
        write!(f, "{parameter}: {infinite} infinite, {nan} NaN")
    }
}

/// Counts the infinite and the NaN elements of a gradient, on its device.
fn count(gradient: &Tensor) -> Result<Tensor> {
    let _own = OutsideRegions::enter();
    let values = match gradient.is_sparse() {
        // Duplicate indices can add up to infinity.
        true => gradient.f_coalesce()?.f_internal_values()?,
        false => gradient.shallow_clone(),
    };
    let values = values.f_detach()?;
    let counts = [values.f_isinf()?, values.f_isnan()?].map(|which| which.f_sum(Kind::Int64));
    let [infinite, nan] = counts;
    Ok(Tensor::f_stack(&[infinite?, nan?], 0)?)
}

/// Reads the two counts of a gradient. Synchronizes.
fn read(counts: &Tensor) -> Result<[i64; 2]> {
    let _own = OutsideRegions::enter();
    let counts = counts.f_to_device(Device::Cpu)?;
    Ok([counts.f_int64_value(&[0])?, counts.f_int64_value(&[1])?])
}

impl Gradients<'_> {
    /// The gradients with infinite or NaN elements among those that a step would use. Synchronizes.
    pub(crate) fn non_finite(&self) -> Result<Vec<NonFiniteGradient>> {
        let mut seen = HashSet::new();
        // Each parameter once, and no frozen ones.
        let taken = self.snapshot().iter().enumerate();
        let taken = taken.filter(|(_, g)| g.is_used() && seen.insert(g.parameter()));
        // All counts are launched before the first is read.
        let counts =
            taken.map(|(index, _)| Ok((index, count(&self.parameters()[index].f_grad()?)?)));
        let counts: Vec<_> = counts.collect::<Result<_>>()?;
        let mut found = Vec::new();
        for (index, count) in counts {
            let [infinite, nan] = read(&count)?;
            if infinite + nan > 0 {
                let parameter = self.describe(index);
                found.push(NonFiniteGradient { parameter, infinite, nan });
            }
        }
        Ok(found)
    }
}

//! Which gradients are infinite or NaN.

use std::collections::HashSet;

use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::gradients::Gradients;

/// A parameter whose gradient holds infinities or NaNs.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NonFiniteGradient {
    /// The parameter: its shape, and its name where it is known, else its place.
    pub parameter: String,
    /// How many elements are infinite.
    pub infinite: i64,
    /// How many elements are NaN.
    pub nan: i64,
}

impl std::fmt::Display for NonFiniteGradient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { parameter, infinite, nan } = self;
        write!(f, "{parameter}: {infinite} infinite, {nan} NaN")
    }
}

/// How many elements of a gradient are infinite, and how many NaN: on its device.
fn count(gradient: &Tensor) -> Result<Tensor> {
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

impl Gradients<'_> {
    /// Which gradients that a step would take hold infinities or NaNs. Waits for the device.
    pub(crate) fn non_finite(&self) -> Result<Vec<NonFiniteGradient>> {
        let mut seen = HashSet::new();
        // Each once, and none of a frozen parameter.
        let taken = self.snapshot().iter().enumerate();
        let taken = taken.filter(|(_, g)| g.is_used() && seen.insert(g.parameter()));
        // All counts set out before the first is read.
        let counts =
            taken.map(|(index, _)| Ok((index, count(&self.parameters()[index].f_grad()?)?)));
        let counts: Vec<_> = counts.collect::<Result<_>>()?;
        let mut found = Vec::new();
        for (index, count) in counts {
            let count = count.f_to_device(Device::Cpu)?;
            let (infinite, nan) = (count.f_int64_value(&[0])?, count.f_int64_value(&[1])?);
            if infinite + nan > 0 {
                let parameter = self.describe(index);
                found.push(NonFiniteGradient { parameter, infinite, nan });
            }
        }
        Ok(found)
    }
}

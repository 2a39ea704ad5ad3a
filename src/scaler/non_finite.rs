//! Which gradients are infinite or NaN.

#![forbid(unsafe_code)]

use std::collections::HashSet;

use tch::{Device, Kind, Tensor};

#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::optim::AmpOptimizer;
use crate::scaler::GradScaler;
use crate::{ffi, sys};

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

impl GradScaler {
    /// Tells which gradients of an optimizer hold infinities or NaNs, and how many: after a skipped step, and before
    /// the gradients are zeroed, it says where to look. Waits for the device. PyTorch has no twin.
    ///
    /// Names are those of a fused optimizer or of [`name_parameters`](Self::name_parameters).
    ///
    /// ```
    /// use tch::{Device, Kind, Tensor, nn, nn::OptimizerConfig};
    /// use tch_amp::GradScaler;
    ///
    /// let vs = nn::VarStore::new(Device::Cpu);
    /// let w = vs.root().var("w", &[3], nn::Init::Const(1.0));
    /// let mut opt = nn::Sgd::default().build(&vs, 0.1)?;
    /// let mut scaler = GradScaler::skip_only(Device::Cpu)?;
    /// scaler.name_parameters(&vs)?;
    /// scaler.backward(&(&w * Tensor::from_slice(&[1.0, f64::INFINITY, f64::NAN])).sum(Kind::Float))?;
    /// if scaler.step(&mut opt)?.is_skipped()? {
    ///     let found = scaler.non_finite_gradients(&opt)?;
    ///     assert_eq!(found[0].to_string(), "parameter `w` [3]: 1 infinite, 1 NaN");
    /// }
    /// scaler.update()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if a gradient cannot be read.
    pub fn non_finite_gradients(
        &self,
        optimizer: &dyn AmpOptimizer,
    ) -> Result<Vec<NonFiniteGradient>> {
        let parameters = optimizer.parameters();
        let now = ffi::gradients_inspect(&parameters)?;
        let mut seen = HashSet::new();
        // What a step would take: each once, and none of a frozen parameter.
        let taken = now.iter().enumerate().filter(|(_, gradient)| {
            let frozen = gradient.flags & sys::GRADIENT_REQUIRES_GRAD == 0;
            gradient.gradient != 0 && !frozen && seen.insert(gradient.parameter)
        });
        // All counts set out before the first is read.
        let counts = taken.map(|(index, _)| Ok((index, count(&parameters[index].f_grad()?)?)));
        let counts: Vec<_> = counts.collect::<Result<_>>()?;
        let mut found = Vec::new();
        for (index, count) in counts {
            let count = count.f_to_device(Device::Cpu)?;
            let (infinite, nan) = (count.f_int64_value(&[0])?, count.f_int64_value(&[1])?);
            if infinite + nan > 0 {
                let parameter = self.describe(optimizer, &parameters, index);
                found.push(NonFiniteGradient { parameter, infinite, nan });
            }
        }
        Ok(found)
    }
}

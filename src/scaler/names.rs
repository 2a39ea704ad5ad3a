//! The names of parameters, and which gradients are non-finite.

use tch::nn::VarStore;

#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::ffi;
use crate::gradients::NonFiniteGradient;
use crate::optim::AmpOptimizer;
use crate::scaler::GradScaler;
use crate::variables::{named, variables};

impl GradScaler {
    /// Uses the names of a `VarStore`'s variables in messages about their gradients. The scaler keeps handles to the
    /// variables as long as it lives. Call it again for variables that are added later. PyTorch has no counterpart.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if the variables cannot be read.
    pub fn name_parameters(&mut self, vs: &VarStore) -> Result<()> {
        let named = named(variables(vs)?);
        let tensors: Vec<_> = named.iter().map(|(_, tensor)| tensor.shallow_clone()).collect();
        self.names.extend(ffi::identities(&tensors)?.into_iter().zip(named));
        Ok(())
    }

    /// Returns the parameters of an optimizer whose gradients are infinite or NaN somewhere, with the number of such
    /// elements. Call it after a skipped step and before the gradients are zeroed, to find the source of an overflow.
    /// Synchronizes. PyTorch has no counterpart.
    ///
    /// The names come from a fused optimizer or from [`name_parameters`](Self::name_parameters).
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if a gradient cannot be read.
    ///
    /// # Examples
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
    pub fn non_finite_gradients(
        &self,
        optimizer: &dyn AmpOptimizer,
    ) -> Result<Vec<NonFiniteGradient>> {
        self.gradients(optimizer)?.non_finite()
    }
}

//! Gradients that are taken away for the duration of a backward pass.

use tch::Tensor;

use crate::error::Result;
use crate::ffi::{self, Widened};

/// The gradients that parameters had before a backward pass. Unless they are [`added`](Self::add), they are put back
/// when this is dropped, so that neither an error nor a panic loses them.
#[derive(Debug)]
pub(crate) struct Taken {
    parameters: Vec<Tensor>,
    gradients: Vec<Option<Tensor>>,
    /// What was done to the half-precision gradients that are there now.
    widened: Option<Widened>,
    is_settled: bool,
}

impl Taken {
    /// Takes the gradients away.
    pub(crate) fn from(parameters: Vec<Tensor>) -> Result<Self> {
        let gradients = ffi::gradients_take(&parameters)?;
        Ok(Self { parameters, gradients, widened: None, is_settled: false })
    }

    pub(crate) fn parameters(&self) -> &[Tensor] {
        &self.parameters
    }

    /// Makes the present gradients f32, in which optimizers with master weights take them.
    pub(crate) fn widen(&mut self) -> Result<()> {
        self.widened = Some(ffi::gradients_widen(&self.parameters)?);
        Ok(())
    }

    /// Adds them to the present gradients. They are not written to.
    pub(crate) fn add(&self) -> Result<()> {
        ffi::gradients_add(&self.parameters, &self.gradients)
    }

    /// Returns the present gradients, and puts the earlier ones back.
    #[cfg(feature = "insight")]
    pub(crate) fn exchange(self) -> Result<Vec<Option<Tensor>>> {
        ffi::gradients_take(&self.parameters)
    }

    /// Leaves the present gradients where they are.
    pub(crate) fn settle(mut self) {
        self.is_settled = true;
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        if !self.is_settled {
            // What the failed backward left is incomplete or scaled. Errors cannot be returned from here.
            let _dropped = ffi::gradients_drop(&self.parameters);
            if let Some(widened) = &self.widened {
                let _failed = widened.undo(&self.parameters);
            }
            let _failed = ffi::gradients_add(&self.parameters, &self.gradients);
        }
    }
}

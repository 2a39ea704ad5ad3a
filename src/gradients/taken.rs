//! Gradients that are taken away for the duration of a backward pass.

use tch::Tensor;

use crate::error::Result;
use crate::ffi;

/// The gradients that parameters had before a backward pass. Unless they are [`added`](Self::add), they are put back when
/// this is dropped, so that neither an error nor a panic loses them.
#[derive(Debug)]
pub(crate) struct Taken {
    parameters: Vec<Tensor>,
    gradients: Vec<Option<Tensor>>,
    is_settled: bool,
}

impl Taken {
    /// Takes the gradients away.
    pub(crate) fn from(parameters: Vec<Tensor>) -> Result<Self> {
        let gradients = ffi::gradients_take(&parameters)?;
        Ok(Self { parameters, gradients, is_settled: false })
    }

    pub(crate) fn parameters(&self) -> &[Tensor] {
        &self.parameters
    }

    /// Adds them to the present gradients. They are not written to.
    pub(crate) fn add(&self) -> Result<()> {
        ffi::gradients_add(&self.parameters, &self.gradients)
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
            let _failed = ffi::gradients_add(&self.parameters, &self.gradients);
        }
    }
}

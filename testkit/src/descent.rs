//! An optimizer that is not part of the crate.

use tch::{Tensor, no_grad};
use tch_amp::Result;
use tch_amp::optim::{AmpOptimizer, Parameters, Step};

/// Plain gradient descent with a learning rate of 1 on a list of tensors.
pub struct Descent(pub Vec<Tensor>);

impl Descent {
    /// Of these tensors.
    pub fn of<'a>(list: impl IntoIterator<Item = &'a Tensor>) -> Self {
        Self(list.into_iter().map(Tensor::shallow_clone).collect())
    }
}

impl AmpOptimizer for Descent {
    fn parameters(&self) -> Parameters<'_> {
        self.0.as_slice().into()
    }

    fn update(&mut self, _step: &Step<'_>) -> Result<()> {
        no_grad(|| {
            for w in &mut self.0 {
                let gradient = w.f_grad()?;
                if gradient.defined() {
                    let _stepped = w.f_sub_(&gradient.f_to_kind(w.f_kind()?)?)?;
                }
            }
            Ok(())
        })
    }
}

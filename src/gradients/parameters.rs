//! A list of parameters.

use tch::Tensor;

/// The parameters of an optimizer, borrowed from it or collected for the call.
#[derive(Debug)]
pub struct Parameters<'a>(List<'a>);

#[derive(Debug)]
enum List<'a> {
    Borrowed(&'a [Tensor]),
    Owned(Vec<Tensor>),
}

impl Parameters<'_> {
    /// Returns the parameters.
    pub fn as_slice(&self) -> &[Tensor] {
        match &self.0 {
            List::Borrowed(tensors) => tensors,
            List::Owned(tensors) => tensors,
        }
    }

    /// The list as an owned one. Clones handles, not data.
    pub(crate) fn into_owned(self) -> Vec<Tensor> {
        match self.0 {
            List::Borrowed(tensors) => tensors.iter().map(Tensor::shallow_clone).collect(),
            List::Owned(tensors) => tensors,
        }
    }
}

impl<'a> From<&'a [Tensor]> for Parameters<'a> {
    fn from(tensors: &'a [Tensor]) -> Self {
        Self(List::Borrowed(tensors))
    }
}

impl From<Vec<Tensor>> for Parameters<'_> {
    fn from(tensors: Vec<Tensor>) -> Self {
        Self(List::Owned(tensors))
    }
}

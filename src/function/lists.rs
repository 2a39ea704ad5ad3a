//! The types in which a function may return its outputs and gradients.

#![forbid(unsafe_code)]

use tch::Tensor;

/// The outputs of a function: a `Tensor`, `[Tensor; N]` or `Vec<Tensor>`.
pub trait Outputs: Sized + private::Outputs {}

/// The gradients that a function returns, one for each input: a `Tensor`, an `Option<Tensor>`, or an array or a `Vec` of
/// either. `None` means that the input has no gradient.
pub trait Gradients: Sized + private::Gradients {}

impl<T: private::Outputs> Outputs for T {}

impl<T: private::Gradients> Gradients for T {}

mod private {
    use super::Tensor;

    pub trait Outputs: Sized {
        fn into_vec(self) -> Vec<Tensor>;

        /// The same number of tensors as one type again; `None` where the number is not the type's.
        fn from_vec(tensors: Vec<Tensor>) -> Option<Self>;
    }

    impl Outputs for Tensor {
        fn into_vec(self) -> Vec<Tensor> {
            vec![self]
        }

        fn from_vec(tensors: Vec<Tensor>) -> Option<Self> {
            <[Tensor; 1]>::from_vec(tensors).map(|[tensor]| tensor)
        }
    }

    impl<const N: usize> Outputs for [Tensor; N] {
        fn into_vec(self) -> Vec<Tensor> {
            self.into()
        }

        fn from_vec(tensors: Vec<Tensor>) -> Option<Self> {
            tensors.try_into().ok()
        }
    }

    impl Outputs for Vec<Tensor> {
        fn into_vec(self) -> Vec<Tensor> {
            self
        }

        fn from_vec(tensors: Vec<Tensor>) -> Option<Self> {
            Some(tensors)
        }
    }

    pub trait Gradients: Sized {
        /// How many there are, where the type says it.
        const COUNT: Option<usize>;

        fn into_vec(self) -> Vec<Option<Tensor>>;
    }

    impl Gradients for Tensor {
        const COUNT: Option<usize> = Some(1);

        fn into_vec(self) -> Vec<Option<Tensor>> {
            vec![Some(self)]
        }
    }

    impl Gradients for Option<Tensor> {
        const COUNT: Option<usize> = Some(1);

        fn into_vec(self) -> Vec<Option<Tensor>> {
            vec![self]
        }
    }

    impl<const N: usize> Gradients for [Tensor; N] {
        const COUNT: Option<usize> = Some(N);

        fn into_vec(self) -> Vec<Option<Tensor>> {
            self.into_iter().map(Some).collect()
        }
    }

    impl<const N: usize> Gradients for [Option<Tensor>; N] {
        const COUNT: Option<usize> = Some(N);

        fn into_vec(self) -> Vec<Option<Tensor>> {
            self.into()
        }
    }

    impl Gradients for Vec<Tensor> {
        const COUNT: Option<usize> = None;

        fn into_vec(self) -> Vec<Option<Tensor>> {
            self.into_iter().map(Some).collect()
        }
    }

    impl Gradients for Vec<Option<Tensor>> {
        const COUNT: Option<usize> = None;

        fn into_vec(self) -> Vec<Option<Tensor>> {
            self
        }
    }
}

pub(crate) use private::{Gradients as GradientList, Outputs as OutputList};

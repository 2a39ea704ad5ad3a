//! The types that a function may return its outputs and gradients in.

use tch::Tensor;

pub(super) use private::{GradientList, OutputList};

/// The outputs of a function: a `Tensor`, `[Tensor; N]` or `Vec<Tensor>`.
#[diagnostic::on_unimplemented(
    message = "a forward cannot return `{Self}`",
    label = "not a list of tensors",
    note = "return a `Tensor`, `[Tensor; N]` or `Vec<Tensor>`, inside of `Ok`"
)]
pub trait Outputs: OutputList {}

impl Outputs for Tensor {}
impl<const N: usize> Outputs for [Tensor; N] {}
impl Outputs for Vec<Tensor> {}

/// The gradients that a function returns, one for each input: a `Tensor`, an `Option<Tensor>`, or an array or a `Vec`
/// of either. `None` means that the input has no gradient.
#[diagnostic::on_unimplemented(
    message = "a backward cannot return `{Self}`",
    label = "not a list of gradients",
    note = "return a `Tensor`, an `Option<Tensor>`, or an array or a `Vec` of either, inside of `Ok`"
)]
pub trait Gradients: GradientList {}

impl Gradients for Tensor {}
impl Gradients for Option<Tensor> {}
impl<const N: usize> Gradients for [Tensor; N] {}
impl<const N: usize> Gradients for [Option<Tensor>; N] {}
impl Gradients for Vec<Tensor> {}
impl Gradients for Vec<Option<Tensor>> {}

/// The sealed traits behind those above, which only this crate can implement.
mod private {
    use super::Tensor;

    pub trait OutputList: Sized {
        fn as_mut_slice(&mut self) -> &mut [Tensor];
    }

    impl OutputList for Tensor {
        fn as_mut_slice(&mut self) -> &mut [Tensor] {
            std::slice::from_mut(self)
        }
    }

    impl<const N: usize> OutputList for [Tensor; N] {
        fn as_mut_slice(&mut self) -> &mut [Tensor] {
            self
        }
    }

    impl OutputList for Vec<Tensor> {
        fn as_mut_slice(&mut self) -> &mut [Tensor] {
            self
        }
    }

    pub trait GradientList: Sized {
        /// The number of gradients, if the type fixes it.
        const COUNT: Option<usize>;

        fn into_vec(self) -> Vec<Option<Tensor>>;
    }

    impl GradientList for Tensor {
        const COUNT: Option<usize> = Some(1);

        fn into_vec(self) -> Vec<Option<Tensor>> {
            vec![Some(self)]
        }
    }

    impl GradientList for Option<Tensor> {
        const COUNT: Option<usize> = Some(1);

        fn into_vec(self) -> Vec<Option<Tensor>> {
            vec![self]
        }
    }

    impl<const N: usize> GradientList for [Tensor; N] {
        const COUNT: Option<usize> = Some(N);

        fn into_vec(self) -> Vec<Option<Tensor>> {
            self.into_iter().map(Some).collect()
        }
    }

    impl<const N: usize> GradientList for [Option<Tensor>; N] {
        const COUNT: Option<usize> = Some(N);

        fn into_vec(self) -> Vec<Option<Tensor>> {
            self.into()
        }
    }

    impl GradientList for Vec<Tensor> {
        const COUNT: Option<usize> = None;

        fn into_vec(self) -> Vec<Option<Tensor>> {
            self.into_iter().map(Some).collect()
        }
    }

    impl GradientList for Vec<Option<Tensor>> {
        const COUNT: Option<usize> = None;

        fn into_vec(self) -> Vec<Option<Tensor>> {
            self
        }
    }
}

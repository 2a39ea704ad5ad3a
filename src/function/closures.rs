//! Functions made of two closures.

use std::borrow::Borrow;

use tch::{Device, Kind, Tensor};

use crate::error::Result;

use super::{
    BackwardContext, ForwardContext, Function, FunctionResult, GradOutputs, Gradients, Outputs,
};

/// Makes a custom function of a forward and a backward, with the arguments that those of [`Function`] have.
///
/// Its options are methods of [`Closures`]; where the closures are `Copy`, so is it. See the [module](super).
pub fn function<F, B, O, G>(forward: F, backward: B) -> Closures<F, B>
where
    F: Fn(&mut ForwardContext, &[&Tensor]) -> FunctionResult<O> + Send + 'static,
    B: Fn(&BackwardContext<'_>, &GradOutputs<'_>) -> FunctionResult<G> + Send + 'static,
    O: Outputs,
    G: Gradients,
{
    Closures {
        forward,
        backward,
        name: "function",
        casts: Casts::default(),
        once_differentiable: false,
    }
}

/// A custom function made by [`function`].
#[derive(Clone, Copy, Debug)]
#[must_use = "a function does nothing until it is applied"]
pub struct Closures<F, B> {
    forward: F,
    backward: B,
    name: &'static str,
    casts: Casts,
    once_differentiable: bool,
}

/// The dtype for the inputs on each type of device that has autocast.
#[derive(Clone, Copy, Debug, Default)]
struct Casts {
    cpu: Option<Kind>,
    cuda: Option<Kind>,
    mps: Option<Kind>,
}

impl<F, B> Closures<F, B> {
    /// Sets the name in messages.
    pub fn name(mut self, name: &'static str) -> Self {
        self.name = name;
        self
    }

    /// Has the inputs cast, and autocast off, inside regions on any device; see [`Function::cast_inputs`].
    pub fn cast_inputs(mut self, dtype: Kind) -> Self {
        self.casts = Casts { cpu: Some(dtype), cuda: Some(dtype), mps: Some(dtype) };
        self
    }

    /// Has the inputs cast, and autocast off, inside regions on this type of device.
    pub fn cast_inputs_on(mut self, device: Device, dtype: Kind) -> Self {
        match device {
            Device::Cpu => self.casts.cpu = Some(dtype),
            Device::Cuda(_) => self.casts.cuda = Some(dtype),
            Device::Mps => self.casts.mps = Some(dtype),
            Device::Vulkan => {} // has no autocast, and so no region
        }
        self
    }

    /// Declares that the backward cannot be differentiated; see [`Function::once_differentiable`].
    pub fn once_differentiable(mut self) -> Self {
        self.once_differentiable = true;
        self
    }
}

impl<F, B> Closures<F, B>
where
    Self: Function,
{
    /// Runs forward on the inputs and records it; [`Function::apply`] without the trait in scope.
    ///
    /// # Errors
    ///
    /// As [`Function::apply`].
    ///
    /// # Panics
    ///
    /// As forward does.
    pub fn apply<T: Borrow<Tensor>>(self, inputs: &[T]) -> Result<<Self as Function>::Outputs> {
        Function::apply(self, inputs)
    }
}

impl<F, B, O, G> Function for Closures<F, B>
where
    F: Fn(&mut ForwardContext, &[&Tensor]) -> FunctionResult<O> + Send + 'static,
    B: Fn(&BackwardContext<'_>, &GradOutputs<'_>) -> FunctionResult<G> + Send + 'static,
    O: Outputs,
    G: Gradients,
{
    type Outputs = O;
    type Gradients = G;

    fn forward(&self, ctx: &mut ForwardContext, inputs: &[&Tensor]) -> FunctionResult<O> {
        (self.forward)(ctx, inputs)
    }

    fn backward(
        &self,
        ctx: &BackwardContext<'_>,
        grad_outputs: &GradOutputs<'_>,
    ) -> FunctionResult<G> {
        (self.backward)(ctx, grad_outputs)
    }

    fn name(&self) -> &str {
        self.name
    }

    fn cast_inputs(&self, device: Device) -> Option<Kind> {
        match device {
            Device::Cpu => self.casts.cpu,
            Device::Cuda(_) => self.casts.cuda,
            Device::Mps => self.casts.mps,
            Device::Vulkan => None,
        }
    }

    fn once_differentiable(&self) -> bool {
        self.once_differentiable
    }
}

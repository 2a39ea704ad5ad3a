//! Functions made of two closures.

use std::borrow::Borrow;

use tch::{Device, Kind, Tensor};

use crate::error::Result;

use super::{
    BackwardContext, ForwardContext, Function, FunctionResult, GradOutputs, Gradients, Outputs,
};

/// Creates a custom function from a forward and a backward, which take the same arguments as the methods of
/// [`Function`].
///
/// The options are methods of [`Closures`], which is `Copy` if both closures are. See the
/// [module](mod@crate::function) for examples.
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
    /// Sets the function's name in messages. Defaults to `function`.
    pub fn name(mut self, name: &'static str) -> Self {
        self.name = name;
        self
    }

    /// Casts the inputs to `dtype` and runs with autocast off inside regions on any device type; see
    /// [`Function::cast_inputs`].
    pub fn cast_inputs(mut self, dtype: Kind) -> Self {
        self.casts = Casts { cpu: Some(dtype), cuda: Some(dtype), mps: Some(dtype) };
        self
    }

    /// Casts the inputs to `dtype` and runs with autocast off inside regions on this device type; see
    /// [`Function::cast_inputs`].
    pub fn cast_inputs_on(mut self, device: Device, dtype: Kind) -> Self {
        match device {
            Device::Cpu => self.casts.cpu = Some(dtype),
            Device::Cuda(_) => self.casts.cuda = Some(dtype),
            Device::Mps => self.casts.mps = Some(dtype),
            Device::Vulkan => {} // has no autocast
        }
        self
    }

    /// Declares that the backward cannot be differentiated; see [`Function::once_differentiable`].
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::Tensor;
    /// use tch_amp::function;
    /// use tch_amp::function::{GradConfig, grad};
    ///
    /// let square = function(
    ///     |ctx, x| { ctx.save_for_backward(x); Ok(x[0].square()) },
    ///     |ctx, grads| { let [x] = ctx.saved_tensors()?; Ok(&grads[0] * x * 2.0) },
    /// ).once_differentiable();
    /// let x = Tensor::from_slice(&[3f32]).set_requires_grad(true);
    /// let differentiable = GradConfig { create_graph: true, ..Default::default() };
    /// let first = grad(&[square.apply(&[&x])?], &[&x], &differentiable)?.remove(0).unwrap();
    /// assert_eq!(first.double_value(&[0]), 6.0);
    /// assert!(grad(&[first], &[&x], &GradConfig::default()).is_err());
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn once_differentiable(mut self) -> Self {
        self.once_differentiable = true;
        self
    }
}

impl<F, B> Closures<F, B>
where
    Self: Function,
{
    /// Runs the forward on the inputs and records the backward. The same as [`Function::apply`], which needs the trait
    /// in scope.
    ///
    /// # Errors
    ///
    /// The same as [`Function::apply`].
    ///
    /// # Panics
    ///
    /// If the forward panics.
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

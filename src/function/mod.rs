//! Custom autograd functions: a forward and a backward of your own, as one operation of libtorch's autograd.
//!
//! A [`Function`] is a value with a `forward` and a `backward`; [`apply`](Function::apply) runs the forward and puts
//! the backward into the graph. The twin of `torch.autograd.Function` with `torch.amp.custom_fwd` and `custom_bwd`.
//!
//! ```
//! use tch::{Device, Kind, Tensor};
//! use tch_amp::function::{BackwardContext, ForwardContext, Function, FunctionResult, GradOutputs};
//!
//! /// The matrix product, with the derivative written out.
//! struct MyMm;
//!
//! impl Function for MyMm {
//!     type Outputs = Tensor;
//!     type Gradients = [Option<Tensor>; 2];
//!
//!     fn forward(&self, ctx: &mut ForwardContext, inputs: &[&Tensor]) -> FunctionResult<Tensor> {
//!         ctx.save_for_backward(inputs);
//!         Ok(inputs[0].f_matmul(inputs[1])?)
//!     }
//!
//!     fn backward(&self, ctx: &BackwardContext<'_>, grads: &GradOutputs<'_>) -> FunctionResult<Self::Gradients> {
//!         let [a, b] = ctx.saved_tensors()?;
//!         let da = ctx.needs_input_grad(0)?.then(|| grads[0].matmul(&b.tr()));
//!         let db = ctx.needs_input_grad(1)?.then(|| a.tr().matmul(&grads[0]));
//!         Ok([da, db])
//!     }
//! }
//!
//! let a = Tensor::randn([2, 3], (Kind::Float, Device::Cpu)).set_requires_grad(true);
//! let b = Tensor::randn([3, 4], (Kind::Float, Device::Cpu));
//! MyMm.apply(&[&a, &b])?.sum(Kind::Float).backward();
//! assert_eq!(a.grad().size(), [2, 3]);
//! # Ok::<(), tch_amp::Error>(())
//! ```
//!
//! # Two closures
//!
//! [`function()`](crate::function()) makes one of two closures; it suits what fits in a line or two:
//!
//! ```
//! use tch::Tensor;
//! use tch_amp::function;
//!
//! let clip = function(|_, x| Ok(x[0].clamp(-1, 1)), |_, grads| Ok(grads[0].shallow_clone()));
//! let x = Tensor::from_slice(&[-3f32, 0.5]).set_requires_grad(true);
//! clip.apply(&[&x])?.sum(None).backward();
//! assert_eq!(x.grad(), Tensor::from_slice(&[1f32, 1.0]));
//! # Ok::<(), tch_amp::Error>(())
//! ```
//!
//! # Autocast
//!
//! The backward runs in the autocast state that the forward ran in: enabled or not, the dtype and the cache flag, on
//! every device type and on whichever thread the engine uses. Without that a backward runs in the state of the thread
//! that called `backward()`, as a rule outside of every region, and mixes dtypes. A function that is right in one
//! precision only says so with [`cast_inputs`](Function::cast_inputs): then, inside a region, its floating inputs are
//! cast and it runs, forward and backward, with autocast off.
//!
//! ```
//! use tch::{Device, Kind, Tensor};
//! use tch_amp::{autocast, function};
//!
//! let exact = function(
//!     |ctx, x| { ctx.save_for_backward(x); Ok(x[0].matmul(x[0])) },
//!     |ctx, g| { let [x] = ctx.saved_tensors()?; Ok(g[0].matmul(&x.tr()) + x.tr().matmul(&g[0])) },
//! ).cast_inputs(Kind::Float);
//! let x = Tensor::eye(3, (Kind::BFloat16, Device::Cpu)).set_requires_grad(true);
//! let y = autocast(Device::Cpu, || exact.apply(&[&x]))??;
//! assert_eq!(y.kind(), Kind::Float);
//! y.sum(None).backward();
//! assert_eq!(x.grad().kind(), Kind::BFloat16);
//! # Ok::<(), tch_amp::Error>(())
//! ```
//!
//! # In detail
//!
//! ## Errors and panics
//!
//! An `Err` of the forward comes back as [`FunctionError::Forward`], its panic as the same panic. An
//! `Err` or a panic of the backward becomes an error of the `backward()` that ran it, which tch reports as `f_backward`
//! or `backward` do, with the function's name, from whichever thread. The grad mode and the autocast state are as
//! before, and what the error did not reach can be used again.
//!
//! ## Inputs and outputs
//!
//! - **No input requires a gradient**, or the call stands in `tch::no_grad` or in inference mode: forward runs, nothing
//!   is recorded, and everything it saved is dropped at once.
//! - **An undefined input** (`Tensor::new()`) reaches the forward as it is.
//! - **An input that is returned as it is** comes out as a view of it.
//! - **Views** of inputs may be returned, but not changed in place afterwards, which libtorch refuses.
//! - **Integer outputs** are not differentiable.
//! - **An output that is returned twice** becomes two outputs.
//! - **The grad mode** is off in forward and, unless the gradient itself is to be differentiated (`create_graph`), in
//!   backward; `tch::with_grad` switches it on.
//!
//! ## Gradients
//!
//! The gradient of an input has the input's shape (libtorch sums one that broadcasts to it), its device, and a floating
//! dtype (or a complex one, for a complex input), which libtorch casts to the input's. Anything else is an error with
//! the function's name and the index, and so is a wrong number of gradients; an array type whose length is not that of
//! the inputs is refused by `apply`. A gradient is ignored where the input is undefined or requires none.
//!
//! ## A backward more than once
//!
//! - **Second derivatives** work where the backward is made of differentiable operations on what
//!   [`save_for_backward`](ForwardContext::save_for_backward) saved, on gradients and on constants; else declare
//!   [`once_differentiable`](Function::once_differentiable).
//! - **A second backward** through the same graph fails unless the first was told to keep it, if forward saved
//!   anything.
//! - **A backward inside the backward** is allowed. One that leads through the very call it runs in is an error, as it
//!   could never end. A *thread* that a backward starts and waits for is beyond that check, and must not do it; nor may
//!   two threads run backwards that each lead through the function in which the other one is.
//!
//! ## Threads and memory
//!
//! libtorch may run the backward and drop the function on any thread, but never runs one call's backward twice at once:
//! the function is `Send` and need not be `Sync`.
//!
//! A value that forward captures never holds the graph, outputs included. Only a cell that is shared with the caller,
//! and into which the caller puts an output of `apply`, can, as `Rc` can.
//!
//! Destructors may do anything, run backwards and open autocast regions included. A long chain of calls, each of which
//! holds the output of the one before, is freed without recursion: a destructor that would run inside of eight others
//! waits until one of these returns.
//!
//! # Checking a derivative
//!
//! [`gradcheck`](crate::gradcheck::gradcheck()) compares it with finite differences, and [`gradgradcheck`](crate::gradcheck::gradgradcheck())
//! does so with the second derivative.

mod apply;
pub(crate) mod closures;
mod context;
mod lists;

use std::borrow::Borrow;

use tch::{Device, Kind, Tensor};

use crate::error::{BoxError, Result};

pub use crate::error::FunctionError;
pub use closures::Closures;
pub use context::{BackwardContext, ForwardContext, GradOutputs};
pub use lists::{Gradients, Outputs};

/// What a forward and a backward return: any error will do, by `?` or by `"text".into()`.
pub type FunctionResult<T> = std::result::Result<T, BoxError>;

/// An operation with a derivative of your own. The twin of `torch.autograd.Function`, and of `custom_fwd` and
/// `custom_bwd`, whose semantics every function has; see the [module](self) for an example.
///
/// What the function needs beside its inputs are its fields. They are `Send`, because libtorch's threads run the
/// backward:
///
/// ```compile_fail,E0277
/// use std::rc::Rc;
/// let factor = Rc::new(2.0);
/// let scale = tch_amp::function(|_, x| Ok(x[0] * 2.0), move |_, g| Ok(&g[0] * *factor));
/// ```
pub trait Function: Send + Sized + 'static {
    /// What forward returns and [`apply`](Self::apply) gives: a `Tensor`, `[Tensor; N]` or `Vec<Tensor>`.
    type Outputs: Outputs;

    /// What backward returns, one for each input: a `Tensor`, an `Option<Tensor>`, or an array or a `Vec` of either.
    type Gradients: Gradients;

    /// Computes the outputs. Runs on the caller's thread, in its autocast state and with gradients off.
    ///
    /// # Errors
    ///
    /// Whatever went wrong; [`apply`](Self::apply) returns it as [`FunctionError::Forward`].
    fn forward(
        &self,
        ctx: &mut ForwardContext,
        inputs: &[&Tensor],
    ) -> FunctionResult<Self::Outputs>;

    /// Computes the gradients of the inputs from those of the outputs. Runs on any thread, in forward's autocast state.
    ///
    /// # Errors
    ///
    /// Whatever went wrong; the `backward()` that runs it reports its message.
    fn backward(
        &self,
        ctx: &BackwardContext<'_>,
        grad_outputs: &GradOutputs<'_>,
    ) -> FunctionResult<Self::Gradients>;

    /// Returns the name in messages: by default that of the type. [`apply`](Self::apply) asks for it.
    fn name(&self) -> &str {
        let path = std::any::type_name::<Self>();
        let path = &path[..path.find('<').unwrap_or(path.len())];
        &path[path.rfind(':').map_or(0, |colon| colon + 1)..]
    }

    /// Returns the dtype to which the inputs are cast inside a region on this type of device; the function then runs,
    /// forward and backward, with autocast off there. `None`, the default, leaves both as they are. Outside of a region
    /// it has no effect.
    ///
    /// Floating tensors are cast, f64 excepted. Autograd records the casts, so that a second derivative reaches the
    /// inputs (in PyTorch it does not). [`apply`](Self::apply) asks once for every type of device with an enabled
    /// region; the index of the device means nothing. The twin of `custom_fwd(device_type=…, cast_inputs=…)`.
    fn cast_inputs(&self, _device: Device) -> Option<Kind> {
        None
    }

    /// Tells that the backward cannot be differentiated. Differentiating what it returned is then an error, and never
    /// a wrong number. The twin of `once_differentiable`, which misses it where no incoming gradient requires one.
    fn once_differentiable(&self) -> bool {
        false
    }

    /// Runs forward on the inputs and records the call in the graph, so that backward answers for it. The twin of
    /// `apply` in `torch.autograd.Function`.
    ///
    /// # Errors
    ///
    /// [`FunctionError::Forward`] if forward fails;
    /// [`FunctionError::Misuse`] for what the context was told wrongly, such as a tensor
    /// marked dirty that is not an input, for a type of `Gradients` whose length is not that of the inputs, and for
    /// what libtorch refuses to record.
    ///
    /// # Panics
    ///
    /// As forward does.
    fn apply<T: Borrow<Tensor>>(self, inputs: &[T]) -> Result<Self::Outputs> {
        let inputs: Vec<&Tensor> = inputs.iter().map(Borrow::borrow).collect();
        apply::apply(self, &inputs)
    }
}

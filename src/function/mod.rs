//! Custom autograd functions: a forward and a backward of your own, as one operation in libtorch's autograd graph; and
//! [`grad`](crate::function::grad()), which returns the gradients of chosen tensors.
//!
//! A [`Function`] is a value with a `forward` and a `backward`; [`apply`](Function::apply) runs the forward and records
//! the backward in the graph. The counterpart of `torch.autograd.Function` with `torch.amp.custom_fwd` and
//! `custom_bwd`.
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
//! [`function()`](crate::function()) creates one from two closures, which suits short functions:
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
//! The backward runs in the autocast state of the forward: the enabled flags, the dtypes and the cache flag, for every
//! device type and on any thread that the engine uses. Otherwise it would run in the state of the thread that calls
//! `backward()`, which is usually outside of all regions, and would mix dtypes. For a function that is correct in one
//! precision only, set [`cast_inputs`](Function::cast_inputs): inside a region its floating-point inputs are then cast,
//! and its forward and backward run with autocast off.
//!
//! ```
//! use tch::{Device, Kind, Tensor};
//! use tch_amp::{function, try_autocast};
//!
//! let exact = function(
//!     |ctx, x| { ctx.save_for_backward(x); Ok(x[0].matmul(x[0])) },
//!     |ctx, g| { let [x] = ctx.saved_tensors()?; Ok(g[0].matmul(&x.tr()) + x.tr().matmul(&g[0])) },
//! ).cast_inputs(Kind::Float);
//! let x = Tensor::eye(3, (Kind::BFloat16, Device::Cpu)).set_requires_grad(true);
//! let y = try_autocast(Device::Cpu, || exact.apply(&[&x]))?;
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
//! If the forward returns an error, `apply` returns it as [`FunctionError::Forward`]; a panic of the forward
//! propagates. If the backward returns an error or panics, on any thread, the `backward()` that runs it fails with a
//! message that contains the function's name: `Tensor::f_backward` returns it and `Tensor::backward` panics with it. In
//! all cases the grad mode and the autocast state are restored.
//!
//! ## Inputs and outputs
//!
//! - **No input requires a gradient**, or the call is made under `tch::no_grad` or in inference mode: the forward runs,
//!   nothing is recorded, and everything that it saved is dropped at once.
//! - **An undefined input** (`Tensor::new()`) is passed to the forward unchanged.
//! - **An input that is returned as an output** is returned to the caller as a view of it.
//! - **Views** of inputs may be returned. libtorch refuses to change them in place afterwards.
//! - **Integer outputs** are not differentiable.
//! - **A tensor that is returned twice** becomes two outputs.
//! - **The grad mode** is off in the forward. It is off in the backward, too, unless the gradient itself is to be
//!   differentiated (`create_graph`). `tch::with_grad` switches it on.
//!
//! ## Gradients
//!
//! The gradient of an input must be on the input's device, and have a floating-point dtype (or a complex one, for a
//! complex input), which libtorch casts to the input's. It must have the input's shape, or a shape that libtorch can
//! reduce to it by summing over broadcast dimensions. Anything else is an error with the function's name and the index,
//! and so is a wrong number of gradients; if the type of the gradients fixes their number, `apply` checks it. The
//! gradient of an input that is undefined or requires none is ignored.
//!
//! ## A backward more than once
//!
//! - **Second derivatives** work if the backward consists of differentiable operations on the tensors of
//!   [`save_for_backward`](ForwardContext::save_for_backward), on gradients and on constants. Otherwise declare
//!   [`once_differentiable`](Function::once_differentiable).
//! - **A second backward** through the same graph fails if the forward saved anything, unless the first one kept the
//!   graph.
//! - **A backward inside the backward** is allowed. If it leads through the call that it runs in, it is an error,
//!   because it would deadlock. This check does not cover other threads: a *thread* that a backward starts and joins
//!   must not run such a backward, and two threads must not each run one that leads through the function that the other
//!   is executing.
//!
//! ## Threads and memory
//!
//! libtorch may run the backward and drop the function on any thread, but never runs the backward of one call on two
//! threads at once. A function must therefore be `Send`, and need not be `Sync`.
//!
//! Values that a forward captures or saves, outputs included, do not keep the graph alive. The one exception is a
//! reference cycle that the caller builds, as with `Rc`: a cell that the function shares with the caller, into which
//! the caller puts an output of `apply`.
//!
//! Destructors may do anything, including running a backward and opening autocast regions. A long chain of calls, each
//! of which holds the output of the previous one, is freed without deep recursion: at most eight destructors are
//! nested, and further ones are deferred until one of these returns.
//!
//! # Checking a derivative
//!
//! [`gradcheck`](crate::gradcheck::gradcheck()) compares the first derivative with finite differences, and
//! [`gradgradcheck`](crate::gradcheck::gradgradcheck()) the second.

mod apply;
pub(crate) mod closures;
mod context;
mod grad;
mod lists;

use std::borrow::Borrow;

use tch::{Device, Kind, Tensor};

use crate::error::{BoxError, Result};

pub use crate::error::FunctionError;
pub use closures::Closures;
pub use context::{BackwardContext, ForwardContext, GradOutputs};
pub use grad::{GradConfig, grad};
pub use lists::{Gradients, Outputs};

/// The result of a forward or a backward. Any error type converts with `?`, and a text with `"text".into()`.
pub type FunctionResult<T> = std::result::Result<T, BoxError>;

/// An operation with a derivative of your own. The counterpart of `torch.autograd.Function`, always with the semantics
/// of `custom_fwd` and `custom_bwd`. See the [module](self) for an example.
///
/// Arguments other than tensors are fields of the implementing type. It must be `Send`, because the backward may run on
/// a thread of libtorch's:
///
/// ```compile_fail,E0277
/// use std::rc::Rc;
/// let factor = Rc::new(2.0);
/// let scale = tch_amp::function(|_, x| Ok(x[0] * 2.0), move |_, g| Ok(&g[0] * *factor));
/// ```
pub trait Function: Send + Sized + 'static {
    /// The outputs of the forward, which [`apply`](Self::apply) returns: a `Tensor`, `[Tensor; N]` or `Vec<Tensor>`.
    type Outputs: Outputs;

    /// The gradients that the backward returns, one for each input: a `Tensor`, an `Option<Tensor>`, or an array or a
    /// `Vec` of either.
    type Gradients: Gradients;

    /// Computes the outputs. Runs on the caller's thread, in its autocast state and with the grad mode off.
    ///
    /// # Errors
    ///
    /// Any error; [`apply`](Self::apply) returns it as [`FunctionError::Forward`].
    fn forward(
        &self,
        ctx: &mut ForwardContext,
        inputs: &[&Tensor],
    ) -> FunctionResult<Self::Outputs>;

    /// Computes the gradients of the inputs from those of the outputs. Runs on any thread, in the autocast state of the
    /// forward. A backward pass that it runs itself has that state, too, as in PyTorch, so that autocast casts its
    /// products, but for those of operators that a rule keeps in f32; `Autocast::enabled(false)` around it prevents
    /// that.
    ///
    /// # Errors
    ///
    /// Any error; the `backward()` that runs it fails with its message.
    fn backward(
        &self,
        ctx: &BackwardContext<'_>,
        grad_outputs: &GradOutputs<'_>,
    ) -> FunctionResult<Self::Gradients>;

    /// Returns the function's name in messages. Defaults to the name of the type.
    fn name(&self) -> &str {
        let path = std::any::type_name::<Self>();
        let path = &path[..path.find('<').unwrap_or(path.len())];
        &path[path.rfind(':').map_or(0, |colon| colon + 1)..]
    }

    /// Returns the dtype that the inputs are cast to inside a region on this type of device. The forward and the
    /// backward then run with autocast off on that device type. `None`, the default, changes nothing. Outside of a
    /// region the method has no effect.
    ///
    /// Floating-point tensors are cast, except f64. Autograd records the casts, so that second derivatives reach the
    /// inputs (in PyTorch they do not). [`apply`](Self::apply) calls this once for every device type with an enabled
    /// region; ignore the index of the device. Corresponds to `custom_fwd(device_type=…, cast_inputs=…)`.
    fn cast_inputs(&self, _device: Device) -> Option<Kind> {
        None
    }

    /// Returns whether the backward cannot be differentiated. If `true`, differentiating its results is an error
    /// instead of a wrong number. The counterpart of `torch.autograd.function.once_differentiable`, which detects this
    /// only if an incoming gradient requires a gradient.
    fn once_differentiable(&self) -> bool {
        false
    }

    /// Runs the forward on the inputs and records the backward in the graph. Corresponds to
    /// `torch.autograd.Function.apply`.
    ///
    /// # Errors
    ///
    /// - [`FunctionError::Forward`] if the forward fails.
    /// - [`FunctionError::Misuse`] if the context was misused, for instance if a tensor was marked dirty that is not an
    ///   input; if the length of `Gradients` is not the number of inputs; if `cast_inputs` returns a dtype that is not
    ///   floating-point; and if libtorch refuses to record the call.
    ///
    /// # Panics
    ///
    /// If the forward panics.
    fn apply<T: Borrow<Tensor>>(self, inputs: &[T]) -> Result<Self::Outputs> {
        let inputs: Vec<&Tensor> = inputs.iter().map(Borrow::borrow).collect();
        apply::apply(self, &inputs)
    }
}

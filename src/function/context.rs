//! The contexts of a forward and a backward.

use std::any::{Any, type_name};
use std::borrow::Borrow;
use std::ops::Index;

use tch::Tensor;

use crate::error::{Error, FunctionError, Result};
use crate::ffi::{self, FunctionInput, SavedValues};

/// The context of a forward: saves tensors and values for the backward, and marks inputs and outputs. The counterpart
/// of `ctx` in `torch.autograd.Function.forward`.
#[derive(Debug)]
pub struct ForwardContext {
    pub(super) infos: Vec<FunctionInput>,
    pub(super) saved: Vec<Tensor>,
    /// At most one of each type.
    pub(super) values: SavedValues,
    pub(super) dirty: Vec<Tensor>,
    pub(super) non_differentiable: Vec<Tensor>,
    pub(super) materialize_grads: bool,
}

impl ForwardContext {
    pub(super) fn new(infos: Vec<FunctionInput>) -> Self {
        Self {
            infos,
            saved: Vec::new(),
            values: SavedValues::new(),
            dirty: Vec::new(),
            non_differentiable: Vec::new(),
            materialize_grads: true,
        }
    }

    /// Saves tensors for the backward: inputs, outputs or others, including undefined ones. A further call replaces the
    /// list. Corresponds to `ctx.save_for_backward` in PyTorch.
    ///
    /// A backward fails if a saved tensor was changed in place in the meantime, or if the saved tensors have been
    /// freed. Tensors that reach the backward in another way, such as [`save_value`](Self::save_value), are not checked
    /// and have no history for second derivatives.
    pub fn save_for_backward<T: Borrow<Tensor>>(&mut self, tensors: &[T]) {
        self.saved = handles(tensors);
    }

    /// Saves a value for the backward. One value of each type is kept: a second one replaces the first. Like saved
    /// tensors, it is freed by the first backward that does not keep the graph. Corresponds to an attribute of `ctx` in
    /// PyTorch.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::Tensor;
    /// use tch_amp::function;
    ///
    /// let power = |n: i64| function(
    ///     move |ctx, x| { ctx.save_for_backward(x); ctx.save_value(n); Ok(x[0].pow_tensor_scalar(n)) },
    ///     |ctx, grads| {
    ///         let ([x], n) = (ctx.saved_tensors()?, *ctx.saved_value::<i64>()?);
    ///         Ok(&grads[0] * x.pow_tensor_scalar(n - 1) * n)
    ///     },
    /// );
    /// let x = Tensor::from_slice(&[2f32]).set_requires_grad(true);
    /// power(3).apply(&[&x])?.sum(None).backward();
    /// assert_eq!(x.grad().double_value(&[0]), 12.0);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn save_value<T: Any + Send>(&mut self, value: T) {
        self.values.retain(|known| !known.is::<T>());
        self.values.push(Box::new(value));
    }

    /// Returns whether a backward may need the gradient of the input, that is, whether the input requires a gradient
    /// and the call is recorded. Under `tch::no_grad` this is `false`, where `ctx.needs_input_grad` in PyTorch is
    /// `true`.
    ///
    /// # Errors
    ///
    /// [`FunctionError::NoSuchInput`] if there is no input of that index.
    pub fn needs_input_grad(&self, input: usize) -> Result<bool> {
        let inputs = self.infos.len();
        let info = self
            .infos
            .get(input)
            .ok_or(Error::Function(FunctionError::NoSuchInput { input, inputs }))?;
        Ok(info.requires_grad())
    }

    /// Marks inputs that the forward has changed in place. Each must be returned as an output, and may be kept only
    /// with [`save_for_backward`](Self::save_for_backward). A further call replaces the list. Corresponds to
    /// `ctx.mark_dirty` in PyTorch.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::Tensor;
    /// use tch_amp::function;
    ///
    /// let negate_ = function(
    ///     |ctx, x| { let x = x[0].shallow_clone().neg_(); ctx.mark_dirty(&[&x]); Ok(x) },
    ///     |_, grads| Ok(-&grads[0]),
    /// );
    /// let w = Tensor::from_slice(&[1f32, -2.0]).set_requires_grad(true);
    /// let x = &w * 2.0;
    /// negate_.apply(&[&x])?.sum(None).backward();
    /// assert_eq!(Vec::<f64>::try_from(&x)?, [-2.0, 4.0]);
    /// assert_eq!(Vec::<f64>::try_from(w.grad())?, [-2.0, -2.0]);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn mark_dirty<T: Borrow<Tensor>>(&mut self, inputs: &[T]) {
        self.dirty = handles(inputs);
    }

    /// Marks outputs that have no derivative. Integer outputs need no mark. A further call replaces the list.
    /// Corresponds to `ctx.mark_non_differentiable` in PyTorch.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::Tensor;
    /// use tch_amp::function;
    ///
    /// let round = function(
    ///     |ctx, x| {
    ///         let rounded = x[0].round();
    ///         let error = x[0] - &rounded;
    ///         ctx.mark_non_differentiable(&[&error]);
    ///         Ok([rounded, error])
    ///     },
    ///     |_, grads| Ok(grads[0].shallow_clone()),
    /// );
    /// let x = Tensor::from_slice(&[1.25f32]).set_requires_grad(true);
    /// let [rounded, error] = round.apply(&[&x])?;
    /// assert_eq!((rounded.requires_grad(), error.requires_grad()), (true, false));
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn mark_non_differentiable<T: Borrow<Tensor>>(&mut self, outputs: &[T]) {
        self.non_differentiable = handles(outputs);
    }

    /// Sets whether the backward receives zeros for an output without a gradient (the default), or no gradient.
    /// Corresponds to `ctx.set_materialize_grads` in PyTorch.
    pub fn set_materialize_grads(&mut self, materialize: bool) {
        self.materialize_grads = materialize;
    }
}

fn handles<T: Borrow<Tensor>>(tensors: &[T]) -> Vec<Tensor> {
    tensors.iter().map(|tensor| tensor.borrow().shallow_clone()).collect()
}

/// The context of a backward: returns what the forward has saved. The counterpart of `ctx` in
/// `torch.autograd.Function.backward`.
#[derive(Debug)]
pub struct BackwardContext<'a> {
    pub(super) node: &'a ffi::Node<'a>,
    pub(super) saved: usize,
    pub(super) values: &'a SavedValues,
}

impl BackwardContext<'_> {
    /// Returns the tensors that the forward saved, as an array.
    ///
    /// # Errors
    ///
    /// [`FunctionError::NotSaved`] if the forward saved another number of tensors, and those of
    /// [`saved_tensors_vec`](Self::saved_tensors_vec).
    ///
    /// # Examples
    ///
    /// ```
    /// # use tch::{Device, Kind, Tensor};
    /// let product = tch_amp::function(
    ///     |ctx, x| { ctx.save_for_backward(x); Ok(x[0] * x[1]) },
    ///     |ctx, grads| { let [a, b] = ctx.saved_tensors()?; Ok([&grads[0] * b, &grads[0] * a]) },
    /// );
    /// # let x = Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    /// # product.apply(&[&x, &x])?.sum(None).backward();
    /// # assert_eq!(x.grad().double_value(&[0]), 2.0);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn saved_tensors<const N: usize>(&self) -> Result<[Tensor; N]> {
        self.saved_tensors_vec()?.try_into().map_err(|saved: Vec<_>| {
            Error::Function(FunctionError::NotSaved {
                wanted: format!("{N} tensors"),
                saved: saved.len().to_string(),
            })
        })
    }

    /// Returns the tensors that the forward saved, as a `Vec`.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if one of them was changed in place after it was saved.
    pub fn saved_tensors_vec(&self) -> Result<Vec<Tensor>> {
        self.node.saved_tensors(self.saved)
    }

    /// Returns the value of this type that the forward saved.
    ///
    /// # Errors
    ///
    /// [`FunctionError::NotSaved`] if the forward saved none.
    pub fn saved_value<T: Any>(&self) -> Result<&T> {
        let value = self.values.iter().find_map(|value| value.downcast_ref());
        value.ok_or_else(|| {
            Error::Function(FunctionError::NotSaved {
                wanted: format!("a value of type {}", type_name::<T>()),
                saved: "none of that type".to_owned(),
            })
        })
    }

    /// Returns whether this backward needs the gradient of the input: the input must require one and, if the backward
    /// computes the gradients of chosen tensors only ([`grad`](crate::function::grad())), lead to one of them.
    /// Corresponds to `ctx.needs_input_grad` in PyTorch.
    ///
    /// # Errors
    ///
    /// [`FunctionError::NoSuchInput`] if there is no input of that index.
    pub fn needs_input_grad(&self, input: usize) -> Result<bool> {
        self.node.needs_input_grad(input)
    }
}

/// The gradients of a function's outputs, as its backward receives them.
///
/// `grads[0]` is the gradient of the first output. Indexing panics if an output has no gradient: if the output is
/// undefined or, without [materialized gradients](ForwardContext::set_materialize_grads), if the running backward did
/// not reach it. [`get`](Self::get) returns `None` instead.
#[derive(Debug)]
pub struct GradOutputs<'a>(pub(super) &'a [ffi::Borrowed]);

impl GradOutputs<'_> {
    /// Returns the gradient of an output, or `None` if it has none.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::Tensor;
    /// use tch_amp::function;
    ///
    /// let multiples = function(
    ///     |ctx, x| { ctx.set_materialize_grads(false); Ok([x[0] * 2.0, x[0] * 3.0]) },
    ///     |_, grads| {
    ///         let parts = [2.0, 3.0].into_iter().zip(grads.iter());
    ///         Ok(parts.filter_map(|(factor, grad)| Some(grad? * factor)).reduce(|a, b| a + b))
    ///     },
    /// );
    /// let x = Tensor::from_slice(&[1f32]).set_requires_grad(true);
    /// let [_, triple] = multiples.apply(&[&x])?;
    /// triple.sum(None).backward();
    /// assert_eq!(x.grad().double_value(&[0]), 3.0);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn get(&self, output: usize) -> Option<&Tensor> {
        self.0.get(output)?.as_deref()
    }

    /// Returns an iterator over the gradients of all outputs, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Option<&Tensor>> {
        self.0.iter().map(Option::as_deref)
    }
}

impl Index<usize> for GradOutputs<'_> {
    type Output = Tensor;

    fn index(&self, output: usize) -> &Tensor {
        let outputs = self.0.len();
        assert!(output < outputs, "there is no output {output}: the function has {outputs}");
        self.get(output).unwrap_or_else(|| {
            panic!(
                "there is no gradient of output {output} of {outputs}: look with get(), or leave set_materialize_grads(true)"
            )
        })
    }
}

//! What a forward tells its backward.

use std::any::{Any, type_name};
use std::borrow::Borrow;
use std::ops::Index;

use tch::Tensor;

use crate::error::{Error, FunctionError, Result};
use crate::ffi::{self, FunctionInput, Values};

/// What a forward tells autograd and its own backward. The twin of `ctx` in `forward`.
#[derive(Debug)]
pub struct ForwardContext {
    pub(super) infos: Vec<FunctionInput>,
    pub(super) saved: Vec<Tensor>,
    /// Each of another type.
    pub(super) values: Values,
    pub(super) dirty: Vec<Tensor>,
    pub(super) non_differentiable: Vec<Tensor>,
    pub(super) materialize_grads: bool,
}

impl ForwardContext {
    pub(super) fn new(infos: Vec<FunctionInput>) -> Self {
        Self {
            infos,
            saved: Vec::new(),
            values: Values::new(),
            dirty: Vec::new(),
            non_differentiable: Vec::new(),
            materialize_grads: true,
        }
    }

    /// Saves tensors for backward: inputs, outputs, or others, undefined ones included. Called again, it replaces the
    /// list.
    ///
    /// libtorch then fails a backward whose saved tensor has been changed in place, and one through a graph whose
    /// saved tensors have been freed. A tensor that goes to backward in another way, such as
    /// [`save_value`](Self::save_value), has neither check and no history.
    pub fn save_for_backward<T: Borrow<Tensor>>(&mut self, tensors: &[T]) {
        self.saved = handles(tensors);
    }

    /// Saves a value for backward, one of each type: a second one of the same type replaces the first. As saved
    /// tensors, it is freed by the first backward that does not keep the graph. In PyTorch, an attribute of `ctx`.
    pub fn save_value<T: Any + Send>(&mut self, value: T) {
        self.values.retain(|known| !known.is::<T>());
        self.values.push(Box::new(value));
    }

    /// Tells whether a backward may want the gradient of the input: where the input requires one and the call is
    /// recorded. Under `tch::no_grad` it is not, and PyTorch's answer is `true` all the same.
    ///
    /// # Errors
    ///
    /// [`FunctionError::NoSuchInput`] for an index without an input.
    pub fn needs_input_grad(&self, input: usize) -> Result<bool> {
        let inputs = self.infos.len();
        let info = self
            .infos
            .get(input)
            .ok_or(Error::Function(FunctionError::NoSuchInput { input, inputs }))?;
        Ok(info.requires_grad())
    }

    /// Marks inputs that forward has changed in place. Each must be returned as an output, and must not be kept but by
    /// [`save_for_backward`](Self::save_for_backward). Called again, it replaces the list.
    pub fn mark_dirty<T: Borrow<Tensor>>(&mut self, inputs: &[T]) {
        self.dirty = handles(inputs);
    }

    /// Marks outputs that have no derivative. Called again, it replaces the list. Integer outputs need no mark.
    pub fn mark_non_differentiable<T: Borrow<Tensor>>(&mut self, outputs: &[T]) {
        self.non_differentiable = handles(outputs);
    }

    /// Sets whether a missing gradient of an output is made zeros before backward sees it (the default), or is `None`
    /// there.
    pub fn set_materialize_grads(&mut self, materialize: bool) {
        self.materialize_grads = materialize;
    }
}

fn handles<T: Borrow<Tensor>>(tensors: &[T]) -> Vec<Tensor> {
    tensors.iter().map(|tensor| tensor.borrow().shallow_clone()).collect()
}

/// What a backward finds of its forward. The twin of `ctx` in `backward`.
#[derive(Debug)]
pub struct BackwardContext<'a> {
    pub(super) node: &'a ffi::Node<'a>,
    pub(super) saved: usize,
    pub(super) values: &'a Values,
}

impl BackwardContext<'_> {
    /// Returns the tensors that forward saved, in an array of their number.
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
    ///
    /// # Errors
    ///
    /// [`FunctionError::NotSaved`] if another number was saved; else as [`saved_tensors_vec`](Self::saved_tensors_vec).
    pub fn saved_tensors<const N: usize>(&self) -> Result<[Tensor; N]> {
        self.saved_tensors_vec()?.try_into().map_err(|saved: Vec<_>| {
            Error::Function(FunctionError::NotSaved {
                wanted: format!("{N} tensors"),
                saved: saved.len().to_string(),
            })
        })
    }

    /// Returns the tensors that forward saved, however many.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if one of them has been changed in place since.
    pub fn saved_tensors_vec(&self) -> Result<Vec<Tensor>> {
        self.node.saved_tensors(self.saved)
    }

    /// Returns the value of this type that forward saved.
    ///
    /// # Errors
    ///
    /// [`FunctionError::NotSaved`] if it saved none.
    pub fn saved_value<T: Any>(&self) -> Result<&T> {
        let value = self.values.iter().find_map(|value| value.downcast_ref());
        value.ok_or_else(|| {
            Error::Function(FunctionError::NotSaved {
                wanted: format!("a value of type {}", type_name::<T>()),
                saved: "none of that type".to_owned(),
            })
        })
    }

    /// Tells whether this backward wants the gradient of the input: where the input requires one, and is among those
    /// that were asked for (`Tensor::run_backward`).
    ///
    /// # Errors
    ///
    /// [`FunctionError::NoSuchInput`] for an index without an input.
    pub fn needs_input_grad(&self, input: usize) -> Result<bool> {
        self.node.needs_input_grad(input)
    }
}

/// The gradients of a function's outputs, as its backward receives them.
///
/// `grads[0]` is the first. Indexing panics where there is none: of an output that is undefined, and without
/// [materialized gradients](ForwardContext::set_materialize_grads) of each that the backward did not reach.
/// [`get`](Self::get) tells.
#[derive(Debug)]
pub struct GradOutputs<'a>(pub(super) &'a [ffi::Borrowed]);

impl GradOutputs<'_> {
    /// Returns the gradient of an output, or `None` where there is none.
    pub fn get(&self, output: usize) -> Option<&Tensor> {
        self.0.get(output)?.as_deref()
    }

    /// Returns the gradients of all outputs, in their order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Option<&Tensor>> {
        self.0.iter().map(Option::as_deref)
    }

    /// Returns the number of outputs.
    #[allow(clippy::len_without_is_empty, reason = "a function without outputs has no backward")]
    pub fn len(&self) -> usize {
        self.0.len()
    }
}

impl Index<usize> for GradOutputs<'_> {
    type Output = Tensor;

    fn index(&self, output: usize) -> &Tensor {
        let outputs = self.len();
        assert!(output < outputs, "there is no output {output}: the function has {outputs}");
        self.get(output).unwrap_or_else(|| {
            panic!(
                "there is no gradient of output {output} of {outputs}: look with get(), or leave set_materialize_grads(true)"
            )
        })
    }
}

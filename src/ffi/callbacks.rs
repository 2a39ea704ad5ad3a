//! Custom autograd functions: the callbacks from libtorch, and access to the node during them.

use std::any::Any;
use std::ffi::{CString, c_char, c_void};
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::{ptr, slice};

use tch::Tensor;

use crate::error::{Error, FunctionError, Result};
use crate::{panics, sys};

use super::call;

/// The callbacks of a custom function whose forward has been recorded. libtorch calls them from any thread, but never
/// two at once.
pub(crate) trait Recorded: Send + 'static {
    /// Computes a gradient or `None` for each input, or returns the message of a failure.
    fn backward(
        &self,
        node: &Node<'_>,
        grad_outputs: &[Borrowed],
    ) -> std::result::Result<Vec<Option<Tensor>>, String>;

    /// Takes out the values that only backward needed, after it has run for the last time. Runs no code of the user.
    fn take_saved(&mut self) -> SavedValues;

    /// Drops values that were taken out. Their destructors are code of the user, and may do anything.
    fn free_saved(values: SavedValues);

    /// Drops the state.
    fn free(self: Box<Self>);
}

/// Values that a forward saved.
pub(crate) type SavedValues = Vec<Box<dyn Any + Send>>;

/// A tensor that libtorch lends for the duration of a callback, or none.
pub(crate) type Borrowed = Option<ManuallyDrop<Tensor>>;

/// The node of a custom function in the graph, while its backward runs.
#[derive(Debug)]
pub(crate) struct Node<'a> {
    raw: *const sys::Node,
    inputs: usize,
    _running: PhantomData<&'a ()>,
}

impl Node<'_> {
    /// Returns the first `count` tensors that forward saved.
    pub(crate) fn saved_tensors(&self, count: usize) -> Result<Vec<Tensor>> {
        let mut saved = vec![ptr::null_mut(); count];
        let out = saved.as_mut_ptr();
        // SAFETY: the array has `count` elements, and a `Node` exists only while its backward runs.
        call(|err| unsafe { sys::tamp_function_saved_tensors(self.raw, out, count, err) })?;
        // SAFETY: on success each pointer is a new tensor that is owned by the caller alone.
        Ok(saved.into_iter().map(|tensor| unsafe { Tensor::from_ptr(tensor) }).collect())
    }

    /// Returns whether the gradient of an input is needed.
    pub(crate) fn needs_input_grad(&self, input: usize) -> Result<bool> {
        if input >= self.inputs {
            return Err(Error::Function(FunctionError::NoSuchInput { input, inputs: self.inputs }));
        }
        // SAFETY: a `Node` exists only while its backward runs, and the shim checks the index as well.
        call(|err| unsafe { sys::tamp_function_needs_input_grad(self.raw, input, err) })
            .map(|needs| needs != 0)
    }
}

/// Makes the function with its callbacks for the shim, including ownership of the state.
pub(super) fn raw_function<R: Recorded>(state: Box<R>, name: &str, flags: u8) -> sys::Function {
    sys::Function {
        state: Box::into_raw(state).cast(),
        backward: function_backward::<R>,
        take_saved: function_take_saved::<R>,
        free_saved: function_free_saved::<R>,
        drop: function_drop::<R>,
        name: name.as_ptr().cast(),
        name_length: name.len(),
        flags,
    }
}

/// Runs the backward of a node's state. A panic is caught and becomes a message.
unsafe extern "C" fn function_backward<R: Recorded>(
    state: *mut c_void,
    node: *const sys::Node,
    grad_outputs: *const *mut sys::Tensor,
    outputs: usize,
    grad_inputs: *mut *mut sys::Tensor,
    inputs: usize,
    err: *mut *mut c_char,
) {
    // SAFETY: `function_record::<R>` made the state, and the shim runs one callback of it at a time.
    let state: &R = unsafe { &*state.cast() };
    let node = Node { raw: node, inputs, _running: PhantomData };
    let run = || {
        let lend = |index| {
            // SAFETY: `grad_outputs` has `outputs` elements.
            let tensor: *mut sys::Tensor = unsafe { *grad_outputs.add(index) };
            // SAFETY: a pointer that is not null is a tensor that outlives the callback; it is never dropped here.
            (!tensor.is_null()).then(|| ManuallyDrop::new(unsafe { Tensor::from_ptr(tensor) }))
        };
        let lent: Vec<Borrowed> = (0..outputs).map(lend).collect();
        state.backward(&node, &lent).and_then(|grads| one_for_each(grads, inputs))
    };
    let answer = catch_unwind(AssertUnwindSafe(run))
        .unwrap_or_else(|panic| Err(format!("backward panicked: {}", panics::into_message(panic))));
    match answer {
        Ok(grads) => {
            // SAFETY: `grad_inputs` has `inputs` elements, and there are as many gradients.
            let out = unsafe { slice::from_raw_parts_mut(grad_inputs, inputs) };
            for (out, grad) in out.iter_mut().zip(grads) {
                *out = grad.map_or(ptr::null_mut(), into_pointer);
            }
        }
        // SAFETY: `err` is valid for a write, as every `err` of the shim.
        Err(message) => unsafe { *err = string_new(&message) },
    }
}

fn one_for_each(
    grads: Vec<Option<Tensor>>,
    inputs: usize,
) -> std::result::Result<Vec<Option<Tensor>>, String> {
    match grads.len() {
        count if count == inputs => Ok(grads),
        count => Err(format!(
            "backward returned {count} gradients for {inputs} inputs; return one for each, or None"
        )),
    }
}

/// Copies a text to a string that the shim frees.
pub(super) fn string_new(text: &str) -> *mut c_char {
    // A NUL would end the text early, so it is replaced by a space.
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    // SAFETY: the text is NUL-terminated.
    unsafe { sys::tamp_string_new(text.as_ptr()) }
}

/// Gives up ownership of a tensor.
fn into_pointer(tensor: Tensor) -> *mut sys::Tensor {
    ManuallyDrop::new(tensor).as_mut_ptr()
}

unsafe extern "C" fn function_take_saved<R: Recorded>(state: *mut c_void) -> *mut c_void {
    // SAFETY: `function_record::<R>` made the state, and the shim runs one callback of it at a time.
    let state: &mut R = unsafe { &mut *state.cast() };
    match state.take_saved() {
        values if values.is_empty() => ptr::null_mut(),
        values => Box::into_raw(Box::new(values)).cast(),
    }
}

unsafe extern "C" fn function_free_saved<R: Recorded>(values: *mut c_void) {
    // SAFETY: `function_take_saved::<R>` made the values, from a box, and the shim frees them once.
    let values: Box<SavedValues> = unsafe { Box::from_raw(values.cast()) };
    panics::swallow(|| R::free_saved(*values));
}

unsafe extern "C" fn function_drop<R: Recorded>(state: *mut c_void) {
    // SAFETY: `function_record::<R>` made the state from a box, and the shim drops it once and last.
    let state: Box<R> = unsafe { Box::from_raw(state.cast()) };
    panics::swallow(|| R::free(state));
}

//! One safe function for each function of the shim. With `sys.rs`, the only home of `unsafe` in this crate.

use std::ffi::{CStr, CString, c_char, c_void};
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::{ptr, slice};

use tch::Tensor;

use crate::error::{Error, Result};
use crate::panics;
use crate::sys;

#[cfg(test)]
mod tests;

/// Calls a function of the shim with `err` as its last argument and turns a message into an error.
fn call<T>(function: impl FnOnce(*mut *mut c_char) -> T) -> Result<T> {
    let mut err = ptr::null_mut();
    let out = function(&mut err);
    if err.is_null() {
        return Ok(out);
    }
    // SAFETY: the shim writes nothing but NUL-terminated strings to `err`, and `err` is not null.
    let message = unsafe { CStr::from_ptr(err) }.to_string_lossy().into_owned();
    // SAFETY: the string came from malloc, and nobody uses it any more.
    unsafe { sys::tamp_string_free(err) };
    Err(Error::Torch(message))
}

/// The pointer that the shim borrows for the length of one call.
fn pointer(tensor: &Tensor) -> *mut sys::Tensor {
    tensor.as_ptr().cast_mut()
}

fn pointers<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> Vec<*mut sys::Tensor> {
    tensors.into_iter().map(pointer).collect()
}

/// Whether libtorch_cuda is linked into this program.
pub(crate) fn cuda_is_linked() -> bool {
    // SAFETY: takes nothing and reads a constant.
    unsafe { sys::tamp_cuda_is_linked() != 0 }
}

/// Initialises CUDA, or says in libtorch's words why it cannot.
pub(crate) fn cuda_initialize() -> Result<()> {
    // SAFETY: `err` is valid for a write.
    call(|err| unsafe { sys::tamp_cuda_initialize(err) })
}

/// Reads the autocast state of the device types that `state` names.
pub(crate) fn autocast_read(state: &mut sys::AutocastState) -> Result<()> {
    assert!(usize::from(state.count) <= sys::AUTOCAST_DEVICES);
    // SAFETY: `state` is a whole struct of the shim's layout, and `count` stays within its array.
    call(|err| unsafe { sys::tamp_autocast_read(state, err) })
}

/// Opens a region: the state is `next`.
pub(crate) fn autocast_enter(next: &sys::AutocastState, outermost: bool) -> Result<()> {
    assert!(usize::from(next.count) <= sys::AUTOCAST_DEVICES);
    // SAFETY: `next` has the shim's layout and outlives the call, and `count` stays within its array.
    call(|err| unsafe { sys::tamp_autocast_enter(next, outermost.into(), err) })
}

/// Closes a region: the state is `previous` again.
pub(crate) fn autocast_exit(previous: &sys::AutocastState, outermost: bool) {
    // SAFETY: `previous` is a whole struct that `autocast_read` filled.
    unsafe { sys::tamp_autocast_exit(previous, outermost.into()) }
}

/// Forgets every cached cast of a weight.
pub(crate) fn autocast_clear_cache() -> Result<()> {
    // SAFETY: `err` is valid for a write.
    call(|err| unsafe { sys::tamp_autocast_clear_cache(err) })
}

/// Describes the gradients of the parameters, in their order.
pub(crate) fn gradients_inspect(parameters: &[Tensor]) -> Result<Vec<sys::Gradient>> {
    let tensors = pointers(parameters);
    let mut gradients = vec![sys::Gradient::default(); tensors.len()];
    let out = gradients.as_mut_ptr();
    // SAFETY: both arrays have `tensors.len()` elements, and `parameters` keeps the tensors alive.
    call(|err| unsafe { sys::tamp_gradients_inspect(tensors.as_ptr(), tensors.len(), out, err) })?;
    Ok(gradients)
}

/// What tells tensors apart: the same number for every handle of one tensor, as long as one of them lives.
pub(crate) fn identities(tensors: &[Tensor]) -> Result<Vec<usize>> {
    let known = gradients_inspect(tensors)?;
    Ok(known.iter().map(|gradient| gradient.parameter).collect())
}

/// Drops the gradient of a parameter.
pub(crate) fn gradient_drop(parameter: &Tensor) -> Result<()> {
    // SAFETY: `parameter` is a live tensor; the shim changes only its gradient slot.
    call(|err| unsafe { sys::tamp_gradient_drop(pointer(parameter), err) })
}

/// Unscales the gradients of `parameters`, all of `found_inf`'s device, and tells whether one was infinite or NaN; `None`
/// where the answer lies on the device.
pub(crate) fn gradients_unscale(
    parameters: &[&Tensor],
    scale: &Tensor,
    found_inf: &Tensor,
    options: u8,
) -> Result<Option<bool>> {
    let tensors = pointers(parameters.iter().copied());
    let (array, count) = (tensors.as_ptr(), tensors.len());
    let (scale, found_inf) = (scale.as_ptr(), pointer(found_inf));
    // SAFETY: the array has `count` elements, the borrows keep every tensor alive, and tensors are changed in place only
    // through libtorch's own handles, which alias freely.
    let answer = call(|err| unsafe {
        sys::tamp_gradients_unscale(array, count, scale, found_inf, options, err)
    })?;
    match answer {
        sys::FINITE => Ok(Some(false)),
        sys::NON_FINITE => Ok(Some(true)),
        sys::ON_DEVICE => Ok(None),
        other => Err(Error::Torch(format!("unscaling answered {other}"))),
    }
}

/// Whether any of the one-element tensors is not zero. Waits for their devices, once.
pub(crate) fn any_nonzero(tensors: &[&Tensor]) -> Result<bool> {
    let tensors = pointers(tensors.iter().copied());
    // SAFETY: the array has `tensors.len()` elements, and the borrows keep the tensors alive.
    call(|err| unsafe { sys::tamp_any_nonzero(tensors.as_ptr(), tensors.len(), err) })
        .map(|any| any != 0)
}

/// Grows or backs off `scale` and counts in `tracker`, in place.
pub(crate) fn scale_update(
    scale: &Tensor,
    tracker: &Tensor,
    found_infs: &[&Tensor],
    rule: &sys::ScaleRule,
) -> Result<()> {
    let tensors = pointers(found_infs.iter().copied());
    let (array, count) = (tensors.as_ptr(), tensors.len());
    let (scale, tracker) = (pointer(scale), pointer(tracker));
    // SAFETY: the array has `count` elements, the borrows keep every tensor alive, and `rule` has the shim's layout.
    call(|err| unsafe { sys::tamp_scale_update(scale, tracker, array, count, rule, err) })
}

/// Clips the gradients of the parameters to a common norm and returns the norm before; `None` without gradients.
pub(crate) fn clip_grad_norm(parameters: &[Tensor], max_norm: f64) -> Result<Option<Tensor>> {
    let tensors = pointers(parameters);
    // SAFETY: the array has `tensors.len()` elements, and `parameters` keeps the tensors alive.
    let norm = call(|err| unsafe {
        sys::tamp_clip_grad_norm(tensors.as_ptr(), tensors.len(), max_norm, err)
    })?;
    // SAFETY: a pointer that is not null is a new tensor, which the shim gave to us alone.
    Ok((!norm.is_null()).then(|| unsafe { Tensor::from_ptr(norm) }))
}

/// Clamps every element of the gradients of the parameters to `-max..=max`.
pub(crate) fn clip_grad_value(parameters: &[Tensor], max: f64) -> Result<()> {
    let tensors = pointers(parameters);
    // SAFETY: the array has `tensors.len()` elements, and `parameters` keeps the tensors alive.
    call(|err| unsafe { sys::tamp_clip_grad_value(tensors.as_ptr(), tensors.len(), max, err) })
}

/// What a custom function does once its forward has been recorded. libtorch calls it from any thread, but never twice at
/// once.
pub(crate) trait Recorded: Send + 'static {
    /// Returns a gradient or `None` for each of `inputs` inputs, or the message of the failure.
    fn backward(
        &self,
        node: &Node<'_>,
        grad_outputs: &[Borrowed],
        inputs: usize,
    ) -> std::result::Result<Vec<Option<Tensor>>, String>;

    /// Frees what only backward needed: it has run and will not again.
    fn release(&mut self);
}

/// A tensor that libtorch lends for the length of a callback, or none.
pub(crate) type Borrowed = Option<ManuallyDrop<Tensor>>;

/// A custom function's place in the graph, while its backward runs.
#[derive(Debug)]
pub(crate) struct Node<'a> {
    raw: *const sys::Node,
    _running: PhantomData<&'a ()>,
}

impl Node<'_> {
    /// The first `count` tensors that forward saved.
    pub(crate) fn saved_tensors(&self, count: usize) -> Result<Vec<Tensor>> {
        let mut saved = vec![ptr::null_mut(); count];
        let out = saved.as_mut_ptr();
        // SAFETY: the array has `count` elements, and a `Node` exists only while its backward runs.
        call(|err| unsafe { sys::tamp_function_saved_tensors(self.raw, out, count, err) })?;
        // SAFETY: on success each pointer is a new tensor, which the shim gave to us alone.
        Ok(saved.into_iter().map(|tensor| unsafe { Tensor::from_ptr(tensor) }).collect())
    }

    /// Whether the gradient of the input is wanted.
    pub(crate) fn needs_input_grad(&self, input: usize) -> Result<bool> {
        // SAFETY: a `Node` exists only while its backward runs, and the shim checks the index.
        call(|err| unsafe { sys::tamp_function_needs_input_grad(self.raw, input, err) })
            .map(|needs| needs != 0)
    }
}

/// Whether autograd will record a call with these inputs, and what the shim wants to know of them afterwards.
pub(crate) fn function_begin(inputs: &[&Tensor]) -> Result<(bool, Vec<sys::FunctionInput>)> {
    let tensors = pointers(inputs.iter().copied());
    let mut infos = vec![sys::FunctionInput::default(); tensors.len()];
    let out = infos.as_mut_ptr();
    // SAFETY: both arrays have `tensors.len()` elements, and `inputs` keeps the tensors alive.
    let recorded =
        call(|err| unsafe { sys::tamp_function_begin(tensors.as_ptr(), tensors.len(), out, err) })?;
    Ok((recorded != 0, infos))
}

/// A call of forward that has ended.
#[derive(Debug)]
pub(crate) struct FunctionCall<'a> {
    /// The function's name, for messages.
    pub(crate) name: &'a str,
    pub(crate) inputs: &'a [&'a Tensor],
    pub(crate) infos: &'a [sys::FunctionInput],
    pub(crate) saved: &'a [Tensor],
    pub(crate) dirty: &'a [Tensor],
    pub(crate) non_differentiable: &'a [Tensor],
    pub(crate) recorded: bool,
}

/// Makes the raw outputs of forward those of an operation of autograd, and gives `state` to it.
pub(crate) fn function_record<R: Recorded>(
    state: Box<R>,
    flags: u8,
    ended: &FunctionCall<'_>,
    outputs: &mut [Tensor],
) -> Result<()> {
    assert_eq!(ended.inputs.len(), ended.infos.len());
    // One array of pointers for all the lists.
    let lists = [ended.saved, ended.dirty, ended.non_differentiable];
    let inputs = ended.inputs.iter().copied();
    let mut all = pointers(inputs.chain(lists.into_iter().flatten()));
    let given = all.len();
    all.extend(outputs.iter_mut().map(Tensor::as_mut_ptr));
    let mut from = 0;
    let mut list = |count: usize| {
        let tensors = all[from..from + count].as_ptr();
        from += count;
        sys::Tensors { tensors, count }
    };
    let raw = sys::FunctionCall {
        inputs: list(ended.inputs.len()),
        infos: ended.infos.as_ptr(),
        saved: list(ended.saved.len()),
        dirty: list(ended.dirty.len()),
        non_differentiable: list(ended.non_differentiable.len()),
        recorded: ended.recorded.into(),
    };
    let function = sys::Function {
        state: Box::into_raw(state).cast(),
        backward: function_backward::<R>,
        release: function_release::<R>,
        drop: function_drop::<R>,
        name: ended.name.as_ptr().cast(),
        name_length: ended.name.len(),
        flags,
    };
    let (out, count) = (all[given..].as_ptr(), outputs.len());
    // SAFETY: every array has the length beside it, the borrows keep their tensors alive, the shim changes `outputs` only
    // through libtorch's own handles, and it takes the state in any case: the three callbacks get it back as what it is.
    call(|err| unsafe { sys::tamp_function_record(&function, &raw, out, count, err) })
}

/// Runs the backward of the state behind a node. A panic ends here, as a message.
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
    let run = || {
        let lend = |index| {
            // SAFETY: `grad_outputs` has `outputs` elements.
            let tensor: *mut sys::Tensor = unsafe { *grad_outputs.add(index) };
            // SAFETY: a pointer that is not null is a tensor that outlives the callback; it is never dropped here.
            (!tensor.is_null()).then(|| ManuallyDrop::new(unsafe { Tensor::from_ptr(tensor) }))
        };
        let lent: Vec<Borrowed> = (0..outputs).map(lend).collect();
        state.backward(&Node { raw: node, _running: PhantomData }, &lent, inputs)
    };
    let answer = catch_unwind(AssertUnwindSafe(run))
        .unwrap_or_else(|panic| Err(format!("backward panicked: {}", panics::into_message(panic))));
    match answer {
        Ok(grads) if grads.len() == inputs => {
            // SAFETY: `grad_inputs` has `inputs` elements.
            let out = unsafe { slice::from_raw_parts_mut(grad_inputs, inputs) };
            for (out, grad) in out.iter_mut().zip(grads) {
                *out = grad.map_or(ptr::null_mut(), into_pointer);
            }
        }
        Ok(grads) => fail(err, format!("{} gradients for {inputs} inputs", grads.len())),
        Err(message) => fail(err, message),
    }
}

/// Writes the message of a failed callback.
fn fail(err: *mut *mut c_char, message: String) {
    // SAFETY: `err` is valid for a write, as every `err` of the shim.
    unsafe { *err = string_new(&message) }
}

/// A copy of the text for the shim to free.
fn string_new(text: &str) -> *mut c_char {
    // A NUL would end the text early: a space says as little.
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    // SAFETY: the text is NUL-terminated.
    unsafe { sys::tamp_string_new(text.as_ptr()) }
}

/// Gives the tensor away.
fn into_pointer(tensor: Tensor) -> *mut sys::Tensor {
    ManuallyDrop::new(tensor).as_mut_ptr()
}

unsafe extern "C" fn function_release<R: Recorded>(state: *mut c_void) {
    // SAFETY: `function_record::<R>` made the state, and the shim runs one callback of it at a time.
    let state: &mut R = unsafe { &mut *state.cast() };
    panics::swallow(|| state.release());
}

unsafe extern "C" fn function_drop<R: Recorded>(state: *mut c_void) {
    // SAFETY: `function_record::<R>` made the state from a box, and the shim drops it once and last.
    let state: Box<R> = unsafe { Box::from_raw(state.cast()) };
    panics::swallow(|| drop(state));
}

/// Makes the `call`-th function of the shim from now on fail; see `csrc/testing.cpp`.
#[cfg(all(test, debug_assertions))]
pub(crate) fn testing_fail_at(call: i64, kind: u8) -> i64 {
    // SAFETY: sets two numbers of the calling thread.
    unsafe { sys::tamp_testing_fail_at(call, kind) }
}

/// Enters or leaves inference mode.
#[cfg(all(test, debug_assertions))]
pub(crate) fn testing_inference_mode(enabled: bool) {
    // SAFETY: holds or drops a guard of the calling thread.
    unsafe { sys::tamp_testing_inference_mode(enabled.into()) }
}

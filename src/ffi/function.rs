//! Custom autograd functions: the calls around a forward.

use tch::Tensor;

use crate::error::Result;
use crate::sys;

use super::callbacks::{Recorded, raw_function};
use super::{call, pointers};

/// The shim's description of an input before forward runs.
#[derive(Clone, Copy, Debug, Default)]
#[repr(transparent)]
pub(crate) struct FunctionInput(sys::FunctionInput);

impl FunctionInput {
    /// Whether the input requires a gradient and the call is recorded.
    pub(crate) fn requires_grad(&self) -> bool {
        self.0.requires_grad != 0
    }
}

/// Returns whether autograd will record a call with these inputs, and the shim's description of each of them.
pub(crate) fn function_begin(inputs: &[&Tensor]) -> Result<(bool, Vec<FunctionInput>)> {
    let tensors = pointers(inputs.iter().copied());
    let mut infos = vec![FunctionInput::default(); tensors.len()];
    let out = infos.as_mut_ptr().cast::<sys::FunctionInput>();
    // SAFETY: both arrays have `tensors.len()` elements, a `FunctionInput` is laid out like the struct inside, and
    // `inputs` keeps the tensors alive.
    let recorded =
        call(|err| unsafe { sys::tamp_function_begin(tensors.as_ptr(), tensors.len(), out, err) })?;
    Ok((recorded != 0, infos))
}

/// A call of forward that has returned.
#[derive(Debug)]
pub(crate) struct FunctionCall<'a> {
    /// The function's name, for messages.
    pub(crate) name: &'a str,
    /// Whether backward gets zeros for outputs without gradients.
    pub(crate) materialize_grads: bool,
    /// Whether backward cannot be differentiated again.
    pub(crate) once_differentiable: bool,
    /// Whether values other than tensors were saved.
    pub(crate) saves_values: bool,
    pub(crate) inputs: &'a [&'a Tensor],
    pub(crate) infos: &'a [FunctionInput],
    pub(crate) saved: &'a [Tensor],
    pub(crate) dirty: &'a [Tensor],
    pub(crate) non_differentiable: &'a [Tensor],
    pub(crate) recorded: bool,
}

impl FunctionCall<'_> {
    fn flags(&self) -> u8 {
        u8::from(self.materialize_grads) * sys::FUNCTION_MATERIALIZE_GRADS
            + u8::from(self.once_differentiable) * sys::FUNCTION_ONCE_DIFFERENTIABLE
            + u8::from(self.saves_values) * sys::FUNCTION_SAVES_VALUES
    }
}

/// Records a call: turns the raw outputs of forward into those of a new autograd node, which owns `state`.
pub(crate) fn function_record<R: Recorded>(
    state: Box<R>,
    ended: &FunctionCall<'_>,
    outputs: &mut [Tensor],
) -> Result<()> {
    assert_eq!(ended.inputs.len(), ended.infos.len());
    // All lists share one array of pointers.
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
        infos: ended.infos.as_ptr().cast(),
        saved: list(ended.saved.len()),
        dirty: list(ended.dirty.len()),
        non_differentiable: list(ended.non_differentiable.len()),
        recorded: ended.recorded.into(),
    };
    let function = raw_function(state, ended.name, ended.flags());
    let (out, count) = (all[given..].as_ptr(), outputs.len());
    // SAFETY: every array has the length beside it, the borrows keep their tensors and the name alive, and the shim
    // changes `outputs` only through libtorch's own handles. It takes ownership of the state even if it fails, and
    // passes it only to the callbacks, which have its type.
    call(|err| unsafe { sys::tamp_function_record(&function, &raw, out, count, err) })
}

/// Whether the running backward accumulates the gradients of all leaves. For a backward only.
pub(crate) fn backward_accumulates() -> Result<bool> {
    // SAFETY: the function has no arguments but the place for its error.
    Ok(call(|err| unsafe { sys::tamp_backward_accumulates(err) })? != 0)
}

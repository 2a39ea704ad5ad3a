//! Custom autograd functions: the calls around a forward.

use tch::Tensor;

use crate::error::Result;
use crate::sys;

use super::callbacks::{Recorded, raw_function};
use super::{call, pointers};

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
    pub(crate) flags: u8,
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
    let function = raw_function(state, ended);
    let (out, count) = (all[given..].as_ptr(), outputs.len());
    // SAFETY: every array has the length beside it, the borrows keep their tensors and the name alive, the shim changes
    // `outputs` only through libtorch's own handles, and it takes the state in any case: the callbacks get it back as
    // what it is.
    call(|err| unsafe { sys::tamp_function_record(&function, &raw, out, count, err) })
}

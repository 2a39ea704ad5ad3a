//! Custom autograd functions: the calls around a forward. The gradients of chosen tensors.

use std::ptr;

use tch::Tensor;

use crate::error::{Error, FunctionError, Result};
use crate::sys;

use super::callbacks::{Recorded, raw_function};
use super::{call, numel, pointer, pointers, sizes};

/// The shim's description of an input before forward runs.
#[derive(Clone, Copy, Debug, Default)]
#[repr(transparent)]
pub(crate) struct FunctionInput(sys::FunctionInput);

impl FunctionInput {
    /// Returns whether the input requires a gradient and the call is recorded.
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

/// The gradients that are wanted, and how they are computed.
#[derive(Debug)]
pub(crate) struct GradCall<'a> {
    pub(crate) outputs: &'a [&'a Tensor],
    /// One for each output. `None` stands for a one.
    pub(crate) grad_outputs: &'a [Option<&'a Tensor>],
    pub(crate) inputs: &'a [&'a Tensor],
    pub(crate) retain_graph: bool,
    pub(crate) create_graph: bool,
    pub(crate) allow_unused: bool,
}

/// Computes the gradients of the outputs with respect to the inputs. Accumulates none.
pub(crate) fn grad(wanted: &GradCall<'_>) -> Result<Vec<Option<Tensor>>> {
    assert_eq!(wanted.outputs.len(), wanted.grad_outputs.len());
    let outputs = pointers(wanted.outputs.iter().copied());
    let given = wanted.grad_outputs.iter().map(|grad| grad.map_or(ptr::null_mut(), pointer));
    let given: Vec<_> = given.collect();
    let inputs = pointers(wanted.inputs.iter().copied());
    let list = |tensors: &Vec<_>| sys::Tensors { tensors: tensors.as_ptr(), count: tensors.len() };
    let raw = sys::GradCall {
        outputs: list(&outputs),
        grad_outputs: list(&given),
        inputs: list(&inputs),
        retain_graph: wanted.retain_graph.into(),
        create_graph: wanted.create_graph.into(),
        allow_unused: wanted.allow_unused.into(),
    };
    let mut gradients = vec![ptr::null_mut(); inputs.len()];
    let (out, mut place) = (gradients.as_mut_ptr(), 0);
    // SAFETY: every array has the length beside it, `gradients` has an element for each input, and the borrows in
    // `wanted` keep the tensors alive.
    let problem = call(|err| unsafe { sys::tamp_grad(&raw, out, &mut place, err) })?;
    if problem != sys::GRAD_POSSIBLE {
        return Err(wanted.refusal(problem, place));
    }
    let gradient = |tensor: *mut sys::Tensor| {
        // SAFETY: a non-null pointer from the shim is a new handle that the caller owns.
        (!tensor.is_null()).then(|| unsafe { Tensor::from_ptr(tensor) })
    };
    Ok(gradients.into_iter().map(gradient).collect())
}

impl GradCall<'_> {
    /// The error for a problem of the tensor at `place` of its list.
    fn refusal(&self, problem: u8, place: usize) -> Error {
        let undefined = |name| {
            let problem = format!(
                "has an undefined tensor at index {place}, such as `Tensor::new()` or the gradient of an unused \
                 parameter; leave it out"
            );
            Error::InvalidArgument { name, problem }
        };
        let misfit = |problem| FunctionError::GradOutput { output: place, problem }.into();
        match problem {
            sys::GRAD_OUTPUT_UNDEFINED => undefined("outputs"),
            sys::GRAD_GIVEN_UNDEFINED => undefined("grad_outputs"),
            sys::GRAD_INPUT_UNDEFINED => undefined("inputs"),
            sys::GRAD_OUTPUT_WITHOUT_GRAPH => FunctionError::NoGraph { output: place }.into(),
            sys::GRAD_INPUT_WITHOUT_GRAD => FunctionError::NoGradient { input: place }.into(),
            sys::GRAD_INPUT_UNUSED => FunctionError::Unused { input: place }.into(),
            sys::GRAD_OUTPUT_NOT_SCALAR => misfit(format!(
                "is not given, but the output has {} elements; sum them, or set `grad_outputs`",
                numel(self.outputs[place])
            )),
            sys::GRAD_OUTPUT_NOT_REAL => {
                misfit("is not given, but the output is complex; set `grad_outputs`".to_owned())
            }
            sys::GRAD_GIVEN_SHAPE | sys::GRAD_GIVEN_DTYPE => misfit(self.misfit(place)),
            unknown => Error::Torch(format!("the shim found problem {unknown} of a gradient")),
        }
    }

    /// Says how a given gradient differs from its output.
    fn misfit(&self, place: usize) -> String {
        let text = |tensor: &Tensor| match (tensor.f_kind(), sizes(tensor)) {
            (Ok(kind), Ok(size)) => format!("{kind:?} of shape {size:?}"),
            _ => "of a dtype that tch lacks, or nested".to_owned(),
        };
        let given = self.grad_outputs[place].map_or_else(String::new, text);
        let output = text(self.outputs[place]);
        format!(
            "is {given}, but the output is {output}; they must have the same shape, and must be both complex or both real"
        )
    }
}

//! One application of a function: its forward, and what is kept of it for the backward.
//!
//! The forward runs on the caller's thread with the grad mode off. The function and what it has saved then move into a
//! node of libtorch's graph, whose backward restores the autocast state of the forward.

use std::mem;

use tch::{Kind, Tensor, no_grad_guard};

use crate::autocast::{AutocastState, callback};
use crate::error::{Error, FunctionError, Result, chain};
use crate::ffi::{OutsideRegions, SavedValues, device_type, dtype_code};
use crate::{ffi, panics};

use super::lists::{GradientList as _, OutputList as _};
use super::{BackwardContext, ForwardContext, Function, GradOutputs};

/// Runs `function` on `inputs` in the autocast state of the thread or, if it casts them, with autocast off.
pub(super) fn apply<F: Function>(function: F, inputs: &[&Tensor]) -> Result<F::Outputs> {
    check_gradient_count(&function, inputs.len())?;
    let here = AutocastState::current()?;
    match Cast::new(&function, here)? {
        None => run(function, inputs, here),
        Some(cast) => {
            let inputs = cast.inputs(inputs)?;
            let inputs: Vec<&Tensor> = inputs.iter().collect();
            cast.state.run(|| run(function, &inputs, cast.state))?
        }
    }
}

fn misuse<F: Function>(function: &F, problem: String) -> Error {
    Error::Function(FunctionError::Misuse { name: function.name().to_owned(), problem })
}

/// Refuses a type of gradients with a fixed length that is not the number of inputs.
fn check_gradient_count<F: Function>(function: &F, inputs: usize) -> Result<()> {
    let count = F::Gradients::COUNT.unwrap_or(inputs);
    if count == inputs {
        return Ok(());
    }
    let problem = format!(
        "its backward returns {count} gradients, but it was given {inputs} inputs; return one for each, or None"
    );
    Err(misuse(function, problem))
}

/// The casts that [`Function::cast_inputs`] asks for in the open regions.
struct Cast {
    /// The dtype for the inputs on each device type.
    dtypes: Vec<(i8, Kind)>,
    /// The thread's state with autocast off on those device types.
    state: AutocastState,
}

impl Cast {
    /// Returns `None` if nothing is to be cast.
    fn new<F: Function>(function: &F, mut state: AutocastState) -> Result<Option<Self>> {
        let mut dtypes = Vec::new();
        for device in state.enabled_devices() {
            let Some(dtype) = function.cast_inputs(device) else { continue };
            if dtype_code(dtype).is_none() {
                let problem =
                    format!("cast_inputs asks for {dtype:?}, which is not a floating dtype");
                return Err(misuse(function, problem));
            }
            dtypes.push((device_type(device)?, dtype));
            state.disable(device);
        }
        Ok((!dtypes.is_empty()).then_some(Self { dtypes, state }))
    }

    /// Returns the inputs of the forward. Autograd records the casts.
    fn inputs(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let _own = OutsideRegions::enter();
        let cast = |input: &&Tensor| match self.dtype_for(input)? {
            Some(dtype) => Ok(input.f_to_kind(dtype)?),
            None => Ok(input.shallow_clone()),
        };
        inputs.iter().map(cast).collect()
    }

    fn dtype_for(&self, input: &Tensor) -> Result<Option<Kind>> {
        if !input.defined() || !input.is_floating_point() || input.f_kind()? == Kind::Double {
            return Ok(None);
        }
        let device = device_type(input.device()).ok();
        Ok(self.dtypes.iter().find(|(known, _)| Some(*known) == device).map(|(_, dtype)| *dtype))
    }
}

/// Runs the forward on the inputs as they are and records the backward.
fn run<F: Function>(
    function: F,
    inputs: &[&Tensor],
    autocast: AutocastState,
) -> Result<F::Outputs> {
    let (recorded, infos) = ffi::function_begin(inputs)?;
    let mut ctx = ForwardContext::new(infos);
    let forward = {
        let _no_grad = no_grad_guard();
        function.forward(&mut ctx, inputs)
    };
    // `function` moves into the graph below, and an error after that needs the name.
    let name = function.name().to_owned();
    let mut outputs = match forward {
        Ok(outputs) => outputs,
        Err(cause) => return Err(Error::Function(FunctionError::Forward { name, cause })),
    };
    let ended = ffi::FunctionCall {
        name: &name,
        materialize_grads: ctx.materialize_grads,
        once_differentiable: function.once_differentiable(),
        saves_values: !ctx.values.is_empty(),
        inputs,
        infos: &ctx.infos,
        saved: &ctx.saved,
        dirty: &ctx.dirty,
        non_differentiable: &ctx.non_differentiable,
        recorded,
    };
    let applied = Applied { function, autocast, saved: ctx.saved.len(), values: ctx.values };
    match ffi::function_record(Box::new(applied), &ended, outputs.as_mut_slice()) {
        Ok(()) => Ok(outputs),
        Err(Error::Torch(problem)) => Err(Error::Function(FunctionError::Misuse { name, problem })),
        Err(other) => Err(other),
    }
}

/// A function after its forward, as libtorch's graph holds it.
struct Applied<F> {
    function: F,
    /// The state that the forward ran in.
    autocast: AutocastState,
    /// The number of tensors that the forward saved.
    saved: usize,
    values: SavedValues,
}

impl<F: Function> ffi::Recorded for Applied<F> {
    fn backward(
        &self,
        node: &ffi::Node<'_>,
        grad_outputs: &[ffi::Borrowed],
    ) -> std::result::Result<Vec<Option<Tensor>>, String> {
        let backward = || {
            let ctx = BackwardContext { node, saved: self.saved, values: &self.values };
            self.function.backward(&ctx, &GradOutputs(grad_outputs))
        };
        match callback(|| self.autocast.restore(backward)) {
            Ok(Ok(grads)) => Ok(grads.into_vec()),
            Ok(Err(error)) => Err(format!("backward failed: {}", chain(&*error))),
            Err(error) => Err(error.to_string()),
        }
    }

    fn take_saved(&mut self) -> SavedValues {
        mem::take(&mut self.values)
    }

    fn free_saved(values: SavedValues) {
        callback(|| drop_each(values));
    }

    fn free(mut self: Box<Self>) {
        let values = self.take_saved();
        callback(|| {
            drop_each(values);
            drop(self);
        });
    }
}

/// Drops the values one by one, because a second panic during unwinding would abort the process.
fn drop_each(values: SavedValues) {
    values.into_iter().for_each(|value| panics::swallow(|| drop(value)));
}

//! Custom functions that several tests apply.

use tch::{Device, Kind, Tensor};
use tch_amp::function::{BackwardContext, ForwardContext, Function, FunctionResult, GradOutputs};

/// The matrix product that PyTorch's own tests of `custom_fwd` use, with or without `cast_inputs`.
#[derive(Clone, Copy, Debug, Default)]
pub struct MyMm {
    /// The dtype to which autocast casts the inputs, if it does.
    pub cast: Option<Kind>,
}

impl Function for MyMm {
    type Outputs = Tensor;
    type Gradients = [Tensor; 2];

    fn forward(&self, ctx: &mut ForwardContext, inputs: &[&Tensor]) -> FunctionResult<Tensor> {
        ctx.save_for_backward(inputs);
        Ok(inputs[0].f_mm(inputs[1])?)
    }

    fn backward(
        &self,
        ctx: &BackwardContext<'_>,
        grads: &GradOutputs<'_>,
    ) -> FunctionResult<[Tensor; 2]> {
        let [a, b] = ctx.saved_tensors()?;
        Ok([grads[0].f_mm(&b.f_tr()?)?, a.f_tr()?.f_mm(&grads[0])?])
    }

    fn cast_inputs(&self, _: Device) -> Option<Kind> {
        self.cast
    }
}

//! One step of a fused optimizer.

#![forbid(unsafe_code)]

use std::sync::{Arc, Mutex};

use tch::Kind;

use crate::device::dtype_code;
use crate::error::{Error, Result};
use crate::ffi::{self, OptimParameter};
use crate::optim::masters::Master;
use crate::optim::optimizer::Slot;
use crate::optim::state::{FirstStep, Skipped, used_keys};
use crate::optim::{Algorithm, Optimizer, ScaledStep};
use crate::sys::{self, Gradient, OptimOptions};

impl Optimizer {
    /// Takes the step that `scaled` describes.
    pub(crate) fn run(&mut self, scaled: &ScaledStep<'_>) -> Result<()> {
        self.take_added()?;
        let gradients = ffi::gradients_inspect(&self.parameters)?;
        let stepped = self.stepped(&gradients)?;
        if stepped.is_empty() {
            return Ok(());
        }
        self.renew_masters()?;
        self.complete(&stepped)?;
        self.launch(&stepped, scaled)?;
        self.note_first_steps(&stepped, scaled);
        self.stamp_masters()
    }

    /// The parameters that a step changes, or the first whose gradient it cannot take.
    fn stepped(&self, gradients: &[Gradient]) -> Result<Vec<usize>> {
        let mut stepped = Vec::with_capacity(gradients.len());
        for (index, gradient) in gradients.iter().enumerate() {
            let frozen = gradient.flags & sys::GRADIENT_REQUIRES_GRAD == 0;
            if gradient.gradient == 0 || frozen {
                continue;
            }
            if let Some(problem) = self.problem(index, gradient) {
                let parameter = format!("parameter `{}`", self.slots[index].name);
                return Err(Error::Gradient { parameter, problem });
            }
            stepped.push(index);
        }
        Ok(stepped)
    }

    /// Why a gradient cannot be taken by the step of its parameter.
    fn problem(&self, index: usize, gradient: &Gradient) -> Option<&'static str> {
        let has = |flag| gradient.flags & flag != 0;
        if has(sys::GRADIENT_SPARSE) {
            return Some(
                "is sparse, which the fused optimizers do not take; make it dense with `to_dense`, or give the parameter to \
                 another optimizer",
            );
        }
        if !has(sys::GRADIENT_STRIDED) {
            return Some("is neither strided nor COO sparse, or holds no data; convert it first");
        }
        if has(sys::GRADIENT_OTHER_SHAPE) {
            return Some(
                "does not have the shape and device of its parameter; drop it with `zero_grad` and run backward again",
            );
        }
        let widened = self.masters.of(&self.parameters[index], index) != Master::None
            && Some(gradient.dtype) == dtype_code(Kind::Float);
        (has(sys::GRADIENT_OTHER_DTYPE) && !widened).then_some(
            "has another dtype than its parameter; drop it with `zero_grad` and run backward again",
        )
    }

    fn launch(&mut self, stepped: &[usize], scaled: &ScaledStep<'_>) -> Result<()> {
        let mut first_steps = Vec::with_capacity(stepped.len());
        for &index in stepped {
            let slot = &mut self.slots[index];
            first_steps.push(match self.groups[slot.group].algorithm {
                Algorithm::Sgd(sgd) if sgd.momentum == 0.0 => false,
                // A buffer of zeros is as good as none where the gradient enters undamped.
                Algorithm::Sgd(sgd) if sgd.dampening == 0.0 => {
                    matches!(slot.state.first_step, FirstStep::Ahead)
                }
                Algorithm::Sgd(_) => slot.state.first_step.is_ahead()?,
                _ => false,
            });
        }
        let options: Vec<OptimOptions> =
            self.groups.iter().map(|group| group.algorithm.options(group.lr)).collect();
        let parameters = stepped.iter().zip(first_steps).map(|(&index, first_step)| {
            let Slot { group, state, .. } = &self.slots[index];
            // What an option that was switched off left behind stays out.
            let used = used_keys(&self.groups[*group].algorithm).len();
            let mut states = state.tensors.each_ref().map(Option::as_ref);
            states[used..].fill(None);
            let parameter = &self.parameters[index];
            let master = self.masters.of(parameter, index);
            OptimParameter {
                parameter,
                step: state.step.as_ref(),
                states,
                master: state.master.as_ref(),
                masters: master.code(),
                seed: master.seed(),
                options: *group,
                first_step,
            }
        });
        let parameters: Vec<_> = parameters.collect();
        let ScaledStep { grad_scale, clip, found_inf } = *scaled;
        ffi::optim_step(&parameters, &options, grad_scale, clip, found_inf)
    }

    /// Notes that momentum buffers have been started.
    fn note_first_steps(&mut self, stepped: &[usize], scaled: &ScaledStep<'_>) {
        let skipped = scaled
            .found_inf
            .map(|found_inf| Arc::new(Mutex::new(Skipped::Unknown(found_inf.shallow_clone()))));
        for &index in stepped {
            let Slot { group, state, .. } = &mut self.slots[index];
            let Algorithm::Sgd(sgd) = self.groups[*group].algorithm else {
                continue;
            };
            if sgd.momentum == 0.0 {
                continue;
            }
            state.first_step = match (&state.first_step, &skipped) {
                (FirstStep::Ahead, Some(skipped)) => FirstStep::Unless(Arc::clone(skipped)),
                _ => FirstStep::Taken,
            };
        }
    }
}

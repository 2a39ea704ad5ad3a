//! The step of a fused optimizer.
//!
//! The shim takes the step in one call and answers for each parameter whether it was stepped, left out, or lacks
//! something. What is lacking is made, and the call repeated: a step in the middle of training is a single call.

use crate::capture;
use crate::error::{
    Error, GradientError, GradientProblem, OptimizerError, ParameterProblem, Result,
};
use crate::ffi::{self, Gradient, Master, OptimParameter, StepAnswer};
use crate::optim::first_step::{FirstStep, Launch};
use crate::optim::optimizer::Slot;
use crate::optim::shards::Shards;
use crate::optim::state::{MANY_STEPS, is_complete, used};
use crate::optim::{Algorithm, Optimizer, ParamGroup, Step};
use tch::Kind;

impl Optimizer {
    /// Takes a step, on all ranks if the state is divided among them.
    pub(crate) fn run(&mut self, step: &Step<'_>) -> Result<()> {
        match self.shards.as_deref().map(Shards::ranks) {
            Some(ranks) => self.run_shared(ranks.as_ref(), step),
            None => self.run_here(step),
        }
    }

    /// Takes a step of the parameters that no other rank steps.
    pub(crate) fn run_here(&mut self, step: &Step<'_>) -> Result<()> {
        self.take_added()?;
        self.enter_graph()?;
        self.ask_first_steps()?;
        let first_steps = self.prepare_first_steps(step)?;
        let answers = self.launch_complete(step)?;
        let taken = self.slots.iter_mut().zip(answers);
        for (slot, _) in taken.filter(|(_, answer)| *answer == StepAnswer::Taken) {
            slot.state.most_steps = slot.state.most_steps.saturating_add(1);
            if has_momentum(&self.groups[slot.group].algorithm) {
                first_steps.note(&mut slot.state.first_step);
            }
        }
        self.note_in_graph()
    }

    /// Launches a step. The shim reports what is missing for it, which is then made: the states at the first step, and
    /// later nothing, unless a parameter was written to from outside.
    pub(crate) fn launch_complete(&mut self, step: &Step<'_>) -> Result<Vec<StepAnswer>> {
        let answers = self.launch(step)?;
        let answers = if answers.iter().all(|answer| is_settled(*answer)) {
            answers
        } else {
            refuse_repair(&answers)?;
            self.repair(&answers)?;
            self.launch(step)?
        };
        if !answers.iter().all(|answer| is_settled(*answer)) {
            let changed = "the parameters or their gradients changed while a step was prepared";
            return Err(Error::Torch(changed.into()));
        }
        Ok(answers)
    }

    /// Makes what a step lacks, or returns an error that names the gradient it cannot take.
    fn repair(&mut self, answers: &[StepAnswer]) -> Result<()> {
        if answers.contains(&StepAnswer::Refused) {
            return Err(self.refusal()?);
        }
        if answers.contains(&StepAnswer::Stale) {
            self.renew_masters()?;
        }
        self.settle_loaded_masters()?;
        let used = |index: &usize| answers[*index] != StepAnswer::LeftOut;
        let used: Vec<_> = (0..answers.len()).filter(used).collect();
        self.complete(&used)
    }

    /// Returns the error that names the parameters in one memory, or the first gradient that no step takes.
    fn refusal(&self) -> Result<Error> {
        self.refuse_overlapping(std::iter::empty())?;
        for (slot, parameter) in self.slots.iter().zip(&self.parameters) {
            if !parameter.f_is_leaf()? {
                let (parameter, problem) = (slot.name.clone(), ParameterProblem::NotALeaf);
                return Ok(Error::Optimizer(OptimizerError::Parameter { parameter, problem }));
            }
        }
        let gradients = ffi::gradients_inspect(&self.parameters)?;
        let problem = |(index, gradient)| Some((index, self.problem(index, gradient)?));
        let refused = gradients.iter().enumerate().filter(|(_, gradient)| gradient.is_used());
        Ok(match refused.into_iter().find_map(problem) {
            Some((index, problem)) => {
                let parameter = format!("parameter `{}`", self.slots[index].name);
                Error::Gradient(GradientError::Unsupported { parameter, problem })
            }
            None => Error::Torch("a gradient changed while a step was prepared".into()),
        })
    }

    /// The reason why a step cannot take a gradient, if there is one.
    fn problem(&self, index: usize, gradient: &Gradient) -> Option<GradientProblem> {
        if gradient.is_sparse() {
            return Some(GradientProblem::Sparse);
        }
        if !gradient.is_strided() {
            return Some(GradientProblem::Layout);
        }
        if gradient.has_other_shape() {
            return Some(GradientProblem::OtherShape);
        }
        let widened = self.masters.of(&self.parameters[index], index) != Master::None
            && gradient.is(Kind::Float);
        (gradient.has_other_dtype() && !widened).then_some(GradientProblem::OtherDtype)
    }

    fn launch(&mut self, step: &Step<'_>) -> Result<Vec<StepAnswer>> {
        let (first_steps, rates) = (self.first_steps()?, self.device_rates()?);
        let options: Vec<_> = self.groups.iter().flat_map(ParamGroup::options).collect();
        let parameters = self.slots.iter().zip(first_steps).enumerate();
        let parameters = parameters.map(|(index, (slot, first_step))| {
            let Slot { group, state, elsewhere, is_matrix, .. } = slot;
            let whole = &self.groups[*group].algorithm;
            let algorithm = &whole.of(*is_matrix);
            let parameter = &self.parameters[index];
            let kept_as = self.states.of(parameter);
            // Tensors that are no longer used, since an option was switched off, are left out.
            let mut states = state.tensors.each_ref().map(Option::as_ref);
            for (tensor, used) in states.iter_mut().zip(used(algorithm, kept_as)) {
                *tensor = tensor.filter(|_| used);
            }
            let master = self.masters.of(parameter, index);
            OptimParameter {
                parameter,
                step: state.step.as_ref(),
                states,
                kept_as,
                kept: state.master.as_ref(),
                master,
                options: 2 * group + usize::from(whole.leaves_to_adamw(*is_matrix)),
                first_step,
                complete: is_complete(state, algorithm, kept_as, master),
                many_steps: state.most_steps >= MANY_STEPS,
                elsewhere: *elsewhere,
            }
        });
        ffi::optim_step(parameters, &options, &rates, step.scale(), &mut self.stamps)
    }

    /// Whether the momentum buffer of each parameter starts with its gradient.
    fn first_steps(&mut self) -> Result<Vec<bool>> {
        let groups = &self.groups;
        let first = |slot: &mut Slot| match groups[slot.group].algorithm {
            Algorithm::Sgd(sgd) if sgd.momentum == 0.0 => Ok(false),
            // Without dampening, a buffer of zeros is equivalent to none.
            Algorithm::Sgd(sgd) if sgd.dampening == 0.0 => {
                Ok(matches!(slot.state.first_step, FirstStep::Ahead))
            }
            Algorithm::Sgd(_) => slot.state.first_step.is_ahead(),
            _ => Ok(false),
        };
        self.slots.iter_mut().map(first).collect()
    }

    /// Asks whether the momentum buffers have been started where the step depends on it. This comes before the step is
    /// prepared, because the steps that it is recorded with must be those that are unknown then.
    fn ask_first_steps(&mut self) -> Result<()> {
        for slot in &mut self.slots {
            let algorithm = &self.groups[slot.group].algorithm;
            if matches!(algorithm, Algorithm::Sgd(sgd) if sgd.momentum != 0.0 && sgd.dampening != 0.0)
            {
                let _asked = slot.state.first_step.is_ahead()?;
            }
        }
        Ok(())
    }

    /// Prepares to record that momentum buffers have been started, if the device decides whether they are.
    fn prepare_first_steps<'a>(&self, step: &Step<'a>) -> Result<Launch<'a>> {
        let mut launch = Launch::new(step.found_inf());
        for slot in &self.slots {
            if has_momentum(&self.groups[slot.group].algorithm) {
                launch.prepare(&slot.state.first_step)?;
            }
        }
        Ok(launch)
    }
}

/// Refuses to make in a graph what every replay would make anew.
fn refuse_repair(answers: &[StepAnswer]) -> Result<()> {
    if !capture::is_capturing() || answers.contains(&StepAnswer::Refused) {
        return Ok(());
    }
    let (call, remedy) = match answers.contains(&StepAnswer::Stale) {
        true => (
            "a write to the weights before the step",
            "master weights do not follow it in a replay",
        ),
        false => ("the first step of a parameter", "give it a gradient in the warm-up, too"),
    };
    capture::refuse(call, remedy)
}

pub(super) fn has_momentum(algorithm: &Algorithm) -> bool {
    matches!(algorithm, Algorithm::Sgd(sgd) if sgd.momentum != 0.0)
}

/// Whether the parameter was stepped or left out.
fn is_settled(answer: StepAnswer) -> bool {
    matches!(answer, StepAnswer::Taken | StepAnswer::LeftOut)
}

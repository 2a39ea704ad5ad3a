//! The step of a fused optimizer.
//!
//! The shim takes the step in one call and answers for each parameter whether it was stepped, left out, or lacks
//! something. What is lacking is made, and the call repeated: a step in the middle of training is a single call.

use crate::capture::{self, Phase};
use crate::error::{
    Error, GradientError, GradientProblem, OptimizerError, ParameterProblem, Result,
};
use crate::ffi::{self, Gradient, Master, OptimOptions, OptimParameter, StepAnswer};
use crate::optim::optimizer::Slot;
use crate::optim::rates::{DeviceRates, DrivesRates};
use crate::optim::shards::{Ranks, Shards};
use crate::optim::state::{FirstStep, Launch, MANY_STEPS, ParameterState, is_complete};
use crate::optim::{MasterWeights, Optimizer, ParamGroup, Step};
use std::sync::Arc;
use tch::{Device, Kind, Tensor};
use xxhash_rust::xxh3::Xxh3Default;

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
            if self.groups[slot.group].algorithm.spec().starts_with_gradient() {
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
            self.refresh_masters()?;
        }
        self.settle_loaded_masters()?;
        let used = |index: &usize| answers[*index] != StepAnswer::LeftOut;
        let used: Vec<_> = (0..answers.len()).filter(used).collect();
        self.allocate_missing_state(&used)
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
            let Slot { group, state, owned_by_other_rank, dims, .. } = slot;
            let whole = &self.groups[*group].algorithm;
            let algorithm = whole.of(*dims);
            let algorithm = algorithm.spec();
            let parameter = &self.parameters[index];
            let kept_as = self.moments.of(parameter);
            // Tensors that are no longer used, since an option was switched off, are left out.
            let mut states = state.tensors.each_ref().map(Option::as_ref);
            for (tensor, used) in states.iter_mut().zip(algorithm.used(kept_as, *dims)) {
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
                options: 2 * group + usize::from(whole.leaves_to_adamw(*dims)),
                first_step,
                complete: is_complete(state, algorithm, *dims, kept_as, master),
                many_steps: state.most_steps >= MANY_STEPS,
                owned_by_other_rank: *owned_by_other_rank,
            }
        });
        ffi::optim_step(parameters, &options, &rates, step.scale(), &mut self.stamps)
    }

    /// Returns for each parameter whether its momentum buffer starts with the gradient.
    fn first_steps(&mut self) -> Result<Vec<bool>> {
        let groups = &self.groups;
        let first = |slot: &mut Slot| {
            let algorithm = groups[slot.group].algorithm.spec();
            if algorithm.first_step_differs() {
                return slot.state.first_step.is_ahead();
            }
            let is_ahead = matches!(slot.state.first_step, FirstStep::Ahead);
            Ok(is_ahead && algorithm.starts_with_gradient())
        };
        self.slots.iter_mut().map(first).collect()
    }

    /// Asks whether the momentum buffers have been started where the step depends on it. This comes before the step is
    /// prepared, because the steps that it is recorded with must be those that are unknown then.
    fn ask_first_steps(&mut self) -> Result<()> {
        for slot in &mut self.slots {
            if self.groups[slot.group].algorithm.spec().first_step_differs() {
                let _asked = slot.state.first_step.is_ahead()?;
            }
        }
        Ok(())
    }

    /// Prepares to record that momentum buffers have been started, if the device decides whether they are.
    fn prepare_first_steps<'a>(&self, step: &Step<'a>) -> Result<Launch<'a>> {
        let mut launch = Launch::new(step.found_inf());
        for slot in &self.slots {
            if self.groups[slot.group].algorithm.spec().starts_with_gradient() {
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

/// Returns whether the parameter was stepped or left out.
fn is_settled(answer: StepAnswer) -> bool {
    matches!(answer, StepAnswer::Taken | StepAnswer::LeftOut)
}

impl Optimizer {
    /// Copies the rates of the groups to the device and, in an iteration of a graph, registers with it. There, steps on
    /// other devices or over ranks are refused.
    pub(super) fn enter_graph(&mut self) -> Result<()> {
        let device = capture::device();
        if let Some(device) = device {
            self.refuse_elsewhere(device)?;
        }
        if device.is_some() || self.rates.is_some() {
            self.make_rates(device)?;
        }
        if let (true, Some(rates)) = (device.is_some(), &self.rates) {
            rates.join(&self.parameters, self.masters != MasterWeights::None);
            self.refuse_first_steps()?;
        }
        let Some(rates) = &self.rates else { return Ok(()) };
        let replays = rates.take_replays();
        for slot in self.slots.iter_mut().filter(|slot| slot.state.most_steps > 0) {
            slot.state.most_steps = slot.state.most_steps.saturating_add(replays);
        }
        rates.write()
    }

    /// Makes room for the rates of all groups on the device.
    fn make_rates(&mut self, device: Option<Device>) -> Result<()> {
        let options = self.step_options();
        let known = self.rates.as_deref();
        if known.is_some_and(|rates| rates.fits(&options)) {
            return Ok(());
        }
        if capture::is_capturing() {
            let remedy = "step the optimizer in the warm-up, too";
            return Err(capture::refusal("the first step of an optimizer", remedy));
        }
        if let Some(device) = known.map(DeviceRates::device).or(device) {
            self.rates = Some(DeviceRates::new(&options, device)?);
        }
        Ok(())
    }

    fn refuse_elsewhere(&self, device: Device) -> Result<()> {
        if self.shards.is_some() {
            return Err(capture::refusal("a sharded optimizer", "train without a graph"));
        }
        let here = |parameter: &Tensor| parameter.device() == device;
        if !self.parameters.iter().all(here) {
            let remedy = "keep the parameters on the device of the graph";
            return Err(capture::refusal("a step of parameters on another device", remedy));
        }
        Ok(())
    }

    /// Refuses to capture a step that starts momentum buffers, since each replay would start them anew.
    fn refuse_first_steps(&self) -> Result<()> {
        let is_ahead = |slot: &Slot| {
            let buffer = slot.state.tensors.iter().any(Option::is_some);
            buffer && matches!(slot.state.first_step, FirstStep::Ahead)
        };
        let momentum =
            |slot: &Slot| self.groups[slot.group].algorithm.spec().starts_with_gradient();
        if capture::is_capturing() && self.slots.iter().any(|slot| momentum(slot) && is_ahead(slot))
        {
            let remedy = "have a step taken before, whose gradients are finite";
            return Err(capture::refusal("the first step that starts a momentum buffer", remedy));
        }
        Ok(())
    }

    /// After a step: notes what a graph relies on, and before a capture asks which momentum buffers were started, which
    /// synchronizes.
    pub(super) fn note_in_graph(&mut self) -> Result<()> {
        let Some(rates) = &self.rates else { return Ok(()) };
        #[cfg(feature = "insight")]
        rates.note_learning_rate()?;
        let settles = capture::phase() == Some(Phase::Settling);
        let mut is_ready = true;
        for slot in &mut self.slots {
            if !self.groups[slot.group].algorithm.spec().starts_with_gradient()
                || slot.state.tensors.iter().all(Option::is_none)
            {
                continue;
            }
            if settles {
                slot.state.first_step.is_ahead()?;
            }
            is_ready &= matches!(slot.state.first_step, FirstStep::Taken);
        }
        rates.note_step(self.slots.iter().map(|slot| &slot.state), is_ready)
    }

    /// The rates of each of the options, two f32 on the device; none if the host's are used.
    pub(super) fn device_rates(&self) -> Result<Vec<Tensor>> {
        self.rates.as_deref().map_or(Ok(Vec::new()), DeviceRates::rows)
    }

    /// The options of all groups, as a step takes them.
    fn step_options(&self) -> Vec<OptimOptions> {
        self.groups.iter().flat_map(ParamGroup::options).collect()
    }

    /// Notes that the groups have changed: replays follow learning rates alone.
    pub(super) fn note_groups(&self, before: &[ParamGroup]) {
        let Some(rates) = &self.rates else { return };
        let at_rate = |group: &ParamGroup| ParamGroup { lr: 0.0, ..*group };
        if !before.iter().map(at_rate).eq(self.groups.iter().map(at_rate)) {
            rates.note_change("the options of the optimizer");
        }
        rates.set(&self.step_options());
    }

    /// The numbers on the device that a schedule can write.
    pub(crate) fn rates_block(&self) -> Option<Tensor> {
        self.rates.as_deref().map(DeviceRates::block)
    }

    /// Leaves the learning rates to a schedule on the device, or to the host.
    pub(crate) fn set_driver(&self, driver: Option<Arc<dyn DrivesRates>>) {
        if let Some(rates) = &self.rates {
            rates.set_driver(driver);
        }
    }

    /// Returns whether this schedule sets the learning rates on the device.
    pub(crate) fn is_driven_by(&self, driver: &Arc<dyn DrivesRates>) -> bool {
        let known = self.rates.as_deref().and_then(DeviceRates::driver);
        known.is_some_and(|known| Arc::ptr_eq(&known, driver))
    }

    /// Lets steps read the learning rates of the groups again, as they are.
    pub(super) fn leave_rates_to_host(&self) {
        if let Some(rates) = &self.rates {
            rates.set_driver(None);
            rates.set(&self.step_options());
        }
    }

    /// Takes the learning rates back from a schedule on the device before the program changes them. Synchronizes if
    /// there is one.
    pub(super) fn take_rates_back(&mut self) -> Result<()> {
        let Some(driver) = self.rates.as_deref().and_then(DeviceRates::driver) else {
            return Ok(());
        };
        // If nothing else has it, its graph and its schedule are gone, and nothing changes the rates any more.
        if Arc::strong_count(&driver) > 2 {
            self.note_change("a learning rate or option that a schedule in the iteration sets");
        }
        self.take_driven_rates()?;
        self.leave_rates_to_host();
        Ok(())
    }

    /// Sets the learning rates of the groups to those of the schedule that a device follows. Synchronizes.
    pub(super) fn take_driven_rates(&mut self) -> Result<()> {
        let driver = self.rates.as_deref().and_then(DeviceRates::driver);
        let lrs = driver.map_or(Ok(Vec::new()), |driver| driver.lrs())?;
        for (group, lr) in self.groups.iter_mut().zip(lrs) {
            group.lr = lr;
        }
        Ok(())
    }

    /// Notes a change that replays do not follow.
    pub(crate) fn note_change(&self, what: &'static str) {
        if let Some(rates) = &self.rates {
            rates.note_change(what);
        }
    }
}

impl Drop for Optimizer {
    fn drop(&mut self) {
        self.note_change("the optimizer, which was dropped");
    }
}

impl Optimizer {
    /// Divides the state among ranks, each of which steps a part of the parameters. The tensors that others keep are
    /// dropped.
    ///
    /// This is stage 1 of ZeRO. Source: Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion
    /// Parameter Models*, <https://arxiv.org/abs/1910.02054>.
    #[cfg_attr(
        not(feature = "distributed"),
        expect(dead_code, reason = "there are no ranks without the feature")
    )]
    pub(crate) fn shard(&mut self, ranks: Arc<dyn Ranks>) -> Result<()> {
        let checked = self.take_added().and_then(|()| {
            if self.shards.is_some() {
                let problem = "already has its state divided among ranks: build a new one, and load the state".to_owned();
                return Err(Error::InvalidArgument { name: "optimizer", problem });
            }
            Ok(self.hash())
        });
        ranks.agree("shard_over of an optimizer", checked, &|| self.lines())?;
        self.shards = Some(Box::new(Shards::new(ranks)));
        self.divide();
        Ok(())
    }

    /// The rank that steps a parameter.
    fn owner(&self, index: usize) -> usize {
        self.shards.as_ref().and_then(|shards| shards.owners().get(index)).copied().unwrap_or(0)
    }

    /// A hash of all that the ranks have to agree on for a step.
    fn hash(&self) -> u64 {
        let mut hasher = Xxh3Default::new();
        let modes = (self.masters, self.moments, &self.groups);
        hasher.update(format!("{modes:?}").as_bytes());
        for (index, (slot, parameter)) in self.slots.iter().zip(&self.parameters).enumerate() {
            hasher.update(slot.name.as_bytes());
            let numbers = [slot.group, self.owner(index), parameter.kind() as usize];
            numbers.iter().for_each(|number| hasher.update(&number.to_le_bytes()));
            hasher.update(&[parameter.requires_grad().into()]);
            parameter.size().iter().for_each(|size| hasher.update(&size.to_le_bytes()));
        }
        hasher.digest()
    }

    /// Returns the text behind [`hash`](Self::hash), with a line for each group and parameter.
    fn lines(&self) -> String {
        let groups = self.groups.iter().enumerate();
        let groups = groups.map(|(index, group)| format!("group {index}: {group:?}\n"));
        let parameters = self.slots.iter().zip(&self.parameters).enumerate();
        let parameters = parameters.map(|(index, (slot, parameter))| {
            let frozen = if parameter.requires_grad() { "" } else { "frozen " };
            format!(
                "the {frozen}parameter {:?} in group {}, {:?} {:?}, on rank {}\n",
                slot.name,
                slot.group,
                parameter.kind(),
                parameter.size(),
                self.owner(index)
            )
        });
        let masters = format!("master weights {:?}, moments {:?}\n", self.masters, self.moments);
        std::iter::once(masters).chain(groups).chain(parameters).collect()
    }

    /// Assigns the parameters that no rank has yet.
    pub(crate) fn divide(&mut self) {
        let Some(mut shards) = self.shards.take() else { return };
        let first = shards.owners().len();
        let sizes: Vec<_> =
            (first..self.slots.len()).map(|index| self.state_bytes(index)).collect();
        shards.assign(first, &sizes);
        let here = shards.ranks().rank();
        for (slot, owner) in self.slots.iter_mut().zip(shards.owners()).skip(first) {
            slot.owned_by_other_rank = *owner != here;
            if slot.owned_by_other_rank {
                slot.state = ParameterState::default();
            }
        }
        self.shards = Some(shards);
    }

    /// The bytes that the state of a parameter takes, or the number of its elements if it has no state.
    fn state_bytes(&self, index: usize) -> u64 {
        let parameter = &self.parameters[index];
        let master = self.masters.of(parameter, index);
        let bytes = |kind: Kind| kind.elt_size_in_bytes() as u64;
        let moment = bytes(master.state_kind().unwrap_or_else(|| parameter.kind()));
        let (count, kept_as) = (ffi::numel(parameter) as u64, self.moments.of(parameter));
        let masters = count.saturating_mul(master.kind().map_or(0, bytes));
        let algorithm = self.algorithm(index);
        let spec = algorithm.spec();
        let tensors = spec.tensors(kept_as).iter().zip(spec.used(kept_as, parameter.dim()));
        let used = tensors.filter(|(_, used)| *used).map(|(tensor, _)| tensor);
        kept_as.moment_bytes(parameter, used, moment).saturating_add(masters).max(count)
    }

    /// Steps the parameters of this rank and exchanges them. Nothing changes unless the step can be taken on all ranks.
    pub(crate) fn run_shared(&mut self, ranks: &dyn Ranks, step: &Step<'_>) -> Result<()> {
        // A step that is skipped makes all of the checks and what is lacking.
        let skip = self.take_added().and_then(|()| ffi::number_new(1.0, Kind::Float, Device::Cpu));
        let checked = skip.and_then(|skip| self.launch_complete(&step.with_found_inf(&skip)));
        let hash = checked.map(|_| self.hash());
        ranks.agree("a step of an optimizer", hash, &|| self.lines())?;
        self.run_and_share(ranks, step).inspect_err(|_| ranks.close())
    }

    fn run_and_share(&mut self, ranks: &dyn Ranks, step: &Step<'_>) -> Result<()> {
        self.run_here(step)?;
        let Some(shards) = &self.shards else { return Ok(()) };
        if self.masters == MasterWeights::None {
            return ranks.share(&self.parameters, shards.owners());
        }
        // Receiving raises the versions of all parameters. Those that were written to from outside, and not stepped,
        // stay without a new stamp.
        let changed = self.stamps.compare(&self.parameters)?;
        ranks.share(&self.parameters, shards.owners())?;
        let matching = changed.iter().zip(&self.parameters).enumerate();
        for (index, (_, parameter)) in matching.filter(|(_, (changed, _))| !**changed) {
            self.stamps.take_one(index, parameter)?;
        }
        Ok(())
    }
}

//! The driver of a schedule.

use std::collections::VecDeque;
use std::sync::Arc;

use tch::Tensor;

use crate::capture;
use crate::checkpoint::{Prepared, SaveState, SavedState, Stateful};
use crate::error::{Error, Result};
use crate::optim::Optimizer;
use crate::scaler::{Answer, StepOutcome, StepResult};
use crate::schedule::Schedule;
use crate::schedule::on_device::DeviceSchedule;
use crate::schedule::progress::{Progress, State, instead, refuse_mmengine};
use crate::schedule::{Changes, Rates};

/// Sets the learning rates of an optimizer by a [`Schedule`], as steps are taken. The counterpart of
/// `torch.optim.lr_scheduler.LRScheduler`.
///
/// On a GPU the outcome of a step arrives a little later. Until then the step counts as taken; if it was skipped, the
/// schedule goes back by it when the answer arrives. Without skipped steps, every iteration therefore has exactly the
/// learning rate that it has in PyTorch.
///
/// In an iteration that a graph captures the device counts the steps that were taken and looks the learning rates up,
/// so that there each step has the rate of a loop that asks for every outcome. The host learns how far it has come by
/// [`catch_up`](Self::catch_up).
///
/// A checkpoint saves it with [`Checkpoint::add`](crate::checkpoint::Checkpoint::add), which waits for the outcomes
/// that are still open. The first step after a restore sets the learning rates that the schedule had, whatever was done
/// to the optimizer in between. In iterations of a graph, a resumed run has the rates of an uninterrupted one. Without
/// a graph it has those of the run that saved it, which by waiting may have learned of a skipped step earlier than a
/// run that does not save.
#[derive(Debug)]
pub struct Scheduler {
    schedule: Schedule,
    state: State,
    /// The rates that the optimizer was given last; `None` after a restore.
    applied: Option<Rates>,
    /// The steps from the first one on whose outcome is not known.
    open: VecDeque<Open>,
    skipped: u64,
    /// The schedule as a device follows it, in iterations that a graph captures.
    device: Option<Arc<DeviceSchedule>>,
}

/// A step that counts as taken until its outcome is known.
#[derive(Debug)]
struct Open {
    answer: Answer,
    /// The numbers that the program had set before the step.
    given: Changes,
    /// The state before the step, with these rates.
    before: State,
}

impl Scheduler {
    pub(super) fn for_optimizer(schedule: Schedule, optimizer: &mut Optimizer) -> Result<Self> {
        let scheduler = Self::new(schedule, Rates::of(optimizer))?;
        scheduler.state.rates.apply(optimizer)?;
        Ok(scheduler)
    }

    pub(super) fn for_lrs(schedule: Schedule, lrs: &[f64]) -> Result<Self> {
        Self::new(schedule, Rates::of_lrs(lrs)?)
    }

    fn new(schedule: Schedule, mut rates: Rates) -> Result<Self> {
        let progress = schedule.start(&mut rates)?;
        let applied = Some(rates.clone());
        let state = State { progress, rates };
        Ok(Self { schedule, state, applied, open: VecDeque::new(), skipped: 0, device: None })
    }

    /// Advances by the step with this outcome, unless it was skipped, and sets the learning rates of the optimizer.
    /// Never synchronizes.
    ///
    /// If the program has changed the groups' learning rates meanwhile, the schedule continues from the changed ones,
    /// as in PyTorch.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if the optimizer has another number of groups than when the scheduler was made, if
    /// the schedule is a [`OneCycleLr`](crate::schedule::OneCycleLr) that has ended, or if the optimizer refuses a
    /// rate, such as one that has grown to infinity; [`Error::Torch`] if the answer of a device cannot be read. The
    /// schedule does not advance then, and the optimizer is unchanged.
    pub fn step(&mut self, optimizer: &mut Optimizer, outcome: &StepOutcome) -> Result<()> {
        self.follow(Some(optimizer), outcome.answer())
    }

    /// Advances by one step and sets the learning rates of the optimizer: without a scaler, or once an epoch.
    ///
    /// # Errors
    ///
    /// The same as [`step`](Self::step).
    pub fn advance(&mut self, optimizer: &mut Optimizer) -> Result<()> {
        self.follow(Some(optimizer), &Answer::Known(StepResult::Stepped))
    }

    /// Advances by the step with this outcome, unless it was skipped, without an optimizer. Never synchronizes. The
    /// program reads the [`lrs`](Self::lrs) and sets them.
    ///
    /// # Errors
    ///
    /// The same as [`step`](Self::step).
    pub fn record(&mut self, outcome: &StepOutcome) -> Result<()> {
        self.follow(None, outcome.answer())
    }

    fn follow(&mut self, optimizer: Option<&mut Optimizer>, answer: &Answer) -> Result<()> {
        if capture::device().is_some() {
            return self.follow_on_device(optimizer, answer);
        }
        self.leave_device(optimizer.as_deref())?;
        self.settle(false)?;
        let (before, given) = self.present(optimizer.as_deref())?;
        let mut state = before.clone();
        let taken = answer.poll()?;
        if taken != Some(false) {
            self.schedule.advance(&mut state.progress, &mut state.rates)?;
        }
        self.commit(optimizer, state)?;
        if taken.is_none() || !self.open.is_empty() {
            self.open.push_back(Open { answer: answer.clone(), given, before });
        } else if taken == Some(false) {
            self.count_skipped(answer);
        }
        Ok(())
    }

    fn count_skipped(&mut self, answer: &Answer) {
        self.skipped += u64::from(!answer.has_no_gradients());
    }

    /// The state from which the next step continues, and what the program has changed in the optimizer.
    fn present(&self, optimizer: Option<&Optimizer>) -> Result<(State, Changes)> {
        let mut state = self.state.clone();
        let Some(optimizer) = optimizer else { return Ok((state, Changes::default())) };
        let there = Rates::of(optimizer);
        let (groups, known) = (there.lrs.len(), state.rates.lrs.len());
        if groups != known {
            let problem = format!(
                "has {groups} parameter groups, and had {known} when the scheduler was made; make it after the groups"
            );
            return Err(Error::InvalidArgument { name: "optimizer", problem });
        }
        let Some(applied) = &self.applied else {
            // A saved state has no momenta; those of the optimizer were restored with it.
            state.rates.momenta = there.momenta;
            return Ok((state, Changes::default()));
        };
        let given = applied.changes(&there);
        state.rates.take(&given);
        Ok((state, given))
    }

    /// Sets the rates of the optimizer and takes over the state, or changes nothing.
    fn commit(&mut self, optimizer: Option<&mut Optimizer>, state: State) -> Result<()> {
        if let Some(optimizer) = optimizer {
            state.rates.apply(optimizer)?;
            self.applied = Some(state.rates.clone());
        }
        self.state = state;
        Ok(())
    }

    /// Goes through the open steps up to the first one whose outcome is unknown, or waits for all of them, and takes
    /// back those that were skipped.
    fn settle(&mut self, waits: bool) -> Result<()> {
        while let Some(open) = self.open.front() {
            let taken = if waits { Some(open.answer.is_stepped()?) } else { open.answer.poll()? };
            match taken {
                None => break,
                Some(true) => drop(self.open.pop_front()),
                Some(false) => self.take_back()?,
            }
        }
        Ok(())
    }

    /// Returns to the state before the first open step, which was skipped, and advances again by the steps since. An
    /// error changes nothing.
    fn take_back(&mut self) -> Result<()> {
        let Some(first) = self.open.front() else { return Ok(()) };
        let mut state = first.before.clone();
        let mut befores = Vec::with_capacity(self.open.len());
        for open in self.open.iter().skip(1) {
            state.rates.take(&open.given);
            befores.push(state.clone());
            if open.answer.poll()? != Some(false) {
                self.schedule.advance(&mut state.progress, &mut state.rates)?;
            }
        }
        self.state = state;
        if let Some(skipped) = self.open.pop_front() {
            self.count_skipped(&skipped.answer);
        }
        for (open, before) in self.open.iter_mut().zip(befores) {
            open.before = before;
        }
        Ok(())
    }

    /// Waits for the outcomes that are on their way, and in iterations that a graph captures for the device, so that
    /// [`lrs`](Self::lrs), [`steps`](Self::steps) and [`skipped`](Self::skipped) are those of all steps. Synchronizes.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if the device fails.
    pub fn catch_up(&mut self) -> Result<()> {
        if self.device.is_some() {
            capture::refuse("catching up with a device", "do it after `replay`")?;
            self.take_from_device()?;
        }
        self.settle(true)
    }

    /// Returns the learning rates after the last step, one for each group. Corresponds to `get_last_lr`.
    pub fn lrs(&self) -> &[f64] {
        &self.state.rates.lrs
    }

    /// Returns the number of steps by which the schedule has advanced, with those that are still
    /// [`pending`](Self::pending). Corresponds to `last_epoch`.
    pub fn steps(&self) -> u64 {
        self.state.progress.last
    }

    /// Returns how many steps are known to have been skipped, since the scheduler was made or restored.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// Returns how many steps still count as taken only because their outcome has not arrived.
    pub fn pending(&self) -> usize {
        self.open.len()
    }

    /// Returns the schedule.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Returns the state with a loaded progress and learning rates, once it was checked that they fit.
    fn with_progress(&self, progress: Progress, lrs: &[f64]) -> Result<State> {
        let groups = self.state.rates.lrs.len();
        let lrs = Rates::of_lrs(lrs)?.lrs;
        if !self.schedule.fits(&progress, groups) || lrs.len() != groups {
            let problem = format!("is not one of this schedule for {groups} groups");
            return Err(Error::InvalidArgument { name: "the scheduler's state", problem });
        }
        let rates = Rates { lrs, ..self.state.rates.clone() };
        Ok(State { progress, rates })
    }

    /// Continues from a loaded state. Steps whose outcome is not known yet are forgotten.
    fn resume(&mut self, state: State) {
        self.state = state;
        self.applied = None;
        self.open.clear();
        self.skipped = 0;
        if let Some(device) = self.device.take() {
            device.note_change("the state of a schedule");
        }
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        if let Some(device) = &self.device {
            device.note_change("the schedule, which was dropped");
        }
    }
}

impl Scheduler {
    /// Follows a step in an iteration of a graph, where the device looks the learning rates up.
    fn follow_on_device(
        &mut self,
        optimizer: Option<&mut Optimizer>,
        answer: &Answer,
    ) -> Result<()> {
        let Some((optimizer, block)) = optimizer.and_then(|o| o.rates_block().map(|b| (o, b)))
        else {
            let remedy = "call `step` or `advance` with the optimizer, after its own step";
            return Err(capture::refusal("a schedule without its optimizer", remedy));
        };
        if !matches!(answer, Answer::Known(StepResult::Stepped) | Answer::OnDevice(_)) {
            return Ok(());
        }
        let device = match &self.device {
            Some(device) if optimizer.is_driven_by(&device.driver()) => Arc::clone(device),
            _ => self.begin_on_device(optimizer, block)?,
        };
        device.follow(answer.flag()?)
    }

    fn begin_on_device(
        &mut self,
        optimizer: &Optimizer,
        block: Tensor,
    ) -> Result<Arc<DeviceSchedule>> {
        if capture::is_capturing() {
            let remedy = "call it in the warm-up, too";
            return Err(capture::refusal("the first step of a schedule", remedy));
        }
        self.take_from_device()?;
        self.settle(true)?;
        let (state, _) = self.present(Some(optimizer))?;
        let (schedule, groups) = (self.schedule.clone(), optimizer.groups.clone());
        let device = DeviceSchedule::new(schedule, state, groups, block, self.skipped)?;
        optimizer.set_driver(Some(device.driver()));
        Ok(Arc::clone(self.device.insert(device)))
    }

    /// Reads how far the device has come. Synchronizes.
    fn take_from_device(&mut self) -> Result<()> {
        if let Some(device) = &self.device {
            let (state, skipped) = device.settle()?;
            self.applied = Some(state.rates.clone());
            (self.state, self.skipped) = (state, skipped);
        }
        Ok(())
    }

    /// Takes the schedule back from a device whose graph is gone. With a graph, its replays take the steps.
    fn leave_device(&mut self, optimizer: Option<&Optimizer>) -> Result<()> {
        let Some(device) = &self.device else {
            // Another schedule may have set the rates in iterations of a graph.
            if let Some(optimizer) = optimizer {
                optimizer.set_driver(None);
            }
            return Ok(());
        };
        // The optimizer has it, too.
        if Arc::strong_count(device) > 2 {
            let remedy = "call it in the iteration, or drop the graph";
            return Err(capture::refusal("a step of a schedule that a graph takes", remedy));
        }
        self.catch_up()?;
        if let Some(optimizer) = optimizer {
            optimizer.set_driver(None);
        }
        (self.device, self.applied) = (None, None);
        Ok(())
    }
}

impl Stateful for Scheduler {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        self.catch_up()?;
        let Progress { last, bases, cycle, parts } = &self.state.progress;
        state.value("last_epoch", last)?;
        state.value("base_lrs", bases)?;
        if let Some(cycle) = cycle {
            state.value("T_cur", &cycle.position)?;
            state.value("T_i", &cycle.length)?;
        }
        if !parts.is_empty() {
            state.value("_schedulers", parts)?;
        }
        state.value("_last_lr", self.lrs())
    }

    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        refuse_mmengine(saved)?;
        if !saved.contains("_last_lr")? {
            let problem = format!(
                "is missing, as in files of detectron2 and of PyTorch before 1.4; {}",
                instead(saved, "last_epoch")
            );
            return Err(saved.wrong("_last_lr", problem));
        }
        let mut progress = self.state.progress.clone();
        progress.read(&self.schedule, saved)?;
        let lrs: Vec<f64> = saved.value("_last_lr")?;
        let loaded = self.with_progress(progress, &lrs)?;
        Ok(Prepared::new(move || self.resume(loaded)))
    }
}

//! What drives a schedule.

use crate::error::{Error, Result};
use crate::optim::Optimizer;
use crate::scaler::{StepCounter, StepOutcome};
use crate::schedule::Schedule;
use crate::schedule::progress::Progress;
use crate::schedule::rates::Rates;

/// Sets the learning rates of an optimizer by a [`Schedule`], as steps are taken. The counterpart of
/// `torch.optim.lr_scheduler.LRScheduler`.
///
/// A checkpoint saves it with [`Checkpoint::add`](crate::checkpoint::Checkpoint::add). The learning rates themselves
/// are in the optimizer's state, as in PyTorch.
#[derive(Debug)]
pub struct Scheduler {
    schedule: Schedule,
    state: State,
    /// What the scaler's steps did.
    counter: StepCounter,
    /// How many of the counted steps the schedule has followed.
    followed: u64,
}

/// What changes as the schedule advances.
#[derive(Clone, Debug)]
pub(crate) struct State {
    progress: Progress,
    rates: Rates,
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
        let state = State { progress, rates };
        Ok(Self { schedule, state, counter: StepCounter::default(), followed: 0 })
    }

    /// Records the outcome of a scaler's step, advances by the steps that are known to have been taken, and sets the
    /// learning rates of the optimizer. Never synchronizes: on a GPU the schedule lags by the steps still in flight.
    ///
    /// If the groups' learning rates were changed meanwhile, the schedule continues from the changed ones, as in
    /// PyTorch.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if the optimizer has another number of groups than when the scheduler was made, or if
    /// the schedule is a [`OneCycleLr`](crate::schedule::OneCycleLr) that has ended; [`Error::Torch`] if the answer of
    /// a device cannot be read. The schedule and the optimizer are unchanged then, and the outcome stays recorded.
    pub fn step(&mut self, optimizer: &mut Optimizer, outcome: StepOutcome) -> Result<()> {
        self.counter.record(outcome);
        self.follow(Some(optimizer))
    }

    /// Advances by one step and sets the learning rates of the optimizer: without a scaler, or once an epoch.
    ///
    /// # Errors
    ///
    /// The same as [`step`](Self::step).
    pub fn advance(&mut self, optimizer: &mut Optimizer) -> Result<()> {
        self.advance_by(1, Some(optimizer))
    }

    /// Records the outcome of a scaler's step and advances by the steps that are known to have been taken, without an
    /// optimizer. Never synchronizes. The program reads the [`lrs`](Self::lrs) and sets them.
    ///
    /// # Errors
    ///
    /// The same as [`step`](Self::step).
    pub fn record(&mut self, outcome: StepOutcome) -> Result<()> {
        self.counter.record(outcome);
        self.follow(None)
    }

    /// Advances by the steps that were counted since the last call.
    fn follow(&mut self, optimizer: Option<&mut Optimizer>) -> Result<()> {
        let taken = self.counter.count()?;
        self.advance_by(taken - self.followed, optimizer)?;
        self.followed = taken;
        Ok(())
    }

    /// Advances by all of these steps and sets the optimizer's rates, or changes nothing.
    fn advance_by(&mut self, steps: u64, mut optimizer: Option<&mut Optimizer>) -> Result<()> {
        let mut state = self.state.clone();
        if let Some(optimizer) = &optimizer {
            state.refresh(optimizer)?;
        }
        for _ in 0..steps {
            self.schedule.advance(&mut state.progress, &mut state.rates)?;
        }
        if let Some(optimizer) = &mut optimizer {
            state.rates.apply(optimizer)?;
        }
        self.state = state;
        Ok(())
    }

    /// Returns the learning rate that the schedule has set last, for each group. Corresponds to `get_last_lr`.
    pub fn lrs(&self) -> &[f64] {
        &self.state.rates.lrs
    }

    /// Returns the number of steps by which the schedule has advanced. Corresponds to `last_epoch`.
    pub fn steps(&self) -> u64 {
        self.state.progress.last
    }

    /// Returns the counts of the steps that were taken and skipped since the scheduler was made or restored.
    pub fn counter(&self) -> &StepCounter {
        &self.counter
    }

    /// Returns the schedule.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    pub(crate) fn progress(&self) -> &Progress {
        &self.state.progress
    }

    /// Returns the state with a loaded progress and learning rates, once it was checked that they fit.
    pub(crate) fn with_progress(&self, progress: Progress, lrs: Vec<f64>) -> Result<State> {
        let groups = self.state.rates.lrs.len();
        if !self.schedule.fits(&progress, groups) || Rates::of_lrs(&lrs)?.lrs.len() != groups {
            let problem = format!("is not one of this schedule for {groups} groups");
            return Err(Error::InvalidArgument { name: "the scheduler's state", problem });
        }
        let rates = Rates { lrs, ..self.state.rates.clone() };
        Ok(State { progress, rates })
    }

    /// Continues from a loaded state. Steps whose outcome is not known yet are forgotten.
    pub(crate) fn resume(&mut self, state: State) {
        self.state = state;
        self.counter = StepCounter::default();
        self.followed = 0;
    }
}

impl State {
    /// Takes over the optimizer's present learning rates and momenta.
    fn refresh(&mut self, optimizer: &Optimizer) -> Result<()> {
        let Rates { lrs, momenta, .. } = Rates::of(optimizer);
        let (groups, known) = (lrs.len(), self.rates.lrs.len());
        if groups != known {
            let problem = format!(
                "has {groups} parameter groups, and had {known} when the scheduler was made; make it after the groups"
            );
            return Err(Error::InvalidArgument { name: "optimizer", problem });
        }
        (self.rates.lrs, self.rates.momenta) = (lrs, momenta);
        Ok(())
    }
}

//! Schedules made of others: one after the other, or all at once.

use serde::{Deserialize, Serialize};

use crate::checkpoint::SavedState;
use crate::error::{Error, Result};
use crate::schedule::Rates;
use crate::schedule::Schedule;
use crate::schedule::progress::{Progress, Rule};

/// Runs schedules one after the other, for instance a warm-up and then a decay. The counterpart of
/// `torch.optim.lr_scheduler.SequentialLR`.
///
/// Its parts may be any schedules but sequences and chains.
///
/// # Examples
///
/// ```
/// use tch_amp::schedule::{ConstantLr, ExponentialLr, SequentialLr};
///
/// let schedule = SequentialLr::new(ConstantLr::default()).then_at(5, ExponentialLr { gamma: 0.9 });
/// assert_eq!(schedule.milestones(), [5]);
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SequentialLr {
    schedules: Vec<Schedule>,
    milestones: Vec<u64>,
}

/// Runs schedules at the same time, each of which changes the learning rate that the one before it has set. The
/// counterpart of `torch.optim.lr_scheduler.ChainedScheduler`.
///
/// Its parts may be any schedules but chains.
///
/// # Examples
///
/// ```
/// use tch_amp::schedule::{ChainedScheduler, ConstantLr, ExponentialLr};
///
/// let schedule = ChainedScheduler::new(ConstantLr::default()).and(ExponentialLr { gamma: 0.9 });
/// assert_eq!(schedule.schedules().len(), 2);
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChainedScheduler {
    schedules: Vec<Schedule>,
}

impl SequentialLr {
    /// Makes a sequence that begins with a schedule.
    pub fn new(first: impl Into<Schedule>) -> Self {
        Self { schedules: vec![first.into()], milestones: Vec::new() }
    }

    /// Adds a schedule that begins after `milestone` steps, counted from the start of the sequence.
    #[must_use]
    pub fn then_at(mut self, milestone: u64, next: impl Into<Schedule>) -> Self {
        self.schedules.push(next.into());
        self.milestones.push(milestone);
        self
    }

    /// Returns the parts.
    pub fn schedules(&self) -> &[Schedule] {
        &self.schedules
    }

    /// Returns the steps at which the parts but the first one begin.
    pub fn milestones(&self) -> &[u64] {
        &self.milestones
    }
}

impl ChainedScheduler {
    /// Makes a chain that begins with a schedule.
    pub fn new(first: impl Into<Schedule>) -> Self {
        Self { schedules: vec![first.into()] }
    }

    /// Adds a schedule, which changes what the ones before it have set.
    #[must_use]
    pub fn and(mut self, next: impl Into<Schedule>) -> Self {
        self.schedules.push(next.into());
        self
    }

    /// Returns the parts.
    pub fn schedules(&self) -> &[Schedule] {
        &self.schedules
    }
}

/// Begins schedules in their order, as PyTorch's constructors do.
fn start_all(schedules: &[Schedule], progress: &mut Progress, rates: &mut Rates) -> Result<()> {
    for schedule in schedules {
        progress.parts.push(schedule.start(rates)?);
    }
    Ok(())
}

fn refused(name: &'static str, problem: &str) -> Result<()> {
    Err(Error::InvalidArgument { name, problem: problem.to_owned() })
}

impl Rule for SequentialLr {
    fn check(&self, _rates: &Rates) -> Result<()> {
        let Self { schedules, milestones } = self;
        if schedules.len() != milestones.len() + 1 {
            return refused("milestones", "must be one fewer than the schedules");
        }
        let rises = milestones.windows(2).all(|pair| pair[0] < pair[1]);
        if milestones.first() == Some(&0) || !rises {
            return refused("milestones", "must be positive and each more than the one before it");
        }
        if schedules.iter().any(|schedule| schedule.part().is_none()) {
            return refused("schedules", "of a sequence must not be sequences or chains");
        }
        Ok(())
    }

    fn first(&self, progress: &mut Progress, rates: &mut Rates) -> Result<()> {
        start_all(&self.schedules, progress, rates)?;
        // The later ones have set their first rates, too.
        rates.lrs.clone_from(&rates.initial);
        self.schedules[0].rule().first(&mut progress.parts[0], rates)
    }

    fn next(&self, progress: &mut Progress, rates: &mut Rates) -> Result<()> {
        let index = self.milestones.partition_point(|&milestone| milestone <= progress.last);
        let (schedule, state) = (&self.schedules[index], &mut progress.parts[index]);
        let begins = index > 0 && self.milestones[index - 1] == progress.last;
        match schedule.part() {
            Some(part) if begins => {
                state.last = 0;
                part.restart(state, rates);
                Ok(())
            }
            _ => schedule.advance(state, rates),
        }
    }

    fn compare(&self, _progress: &Progress, saved: &SavedState<'_>) -> Result<()> {
        saved.option("_milestones", &self.milestones)
    }
}

impl Rule for ChainedScheduler {
    fn check(&self, _rates: &Rates) -> Result<()> {
        if self.schedules.is_empty() {
            return refused("schedules", "of a chain must be at least one");
        }
        if self.schedules.iter().any(|part| matches!(part, Schedule::ChainedScheduler(_))) {
            return refused("schedules", "of a chain must not be chains");
        }
        Ok(())
    }

    fn first(&self, progress: &mut Progress, rates: &mut Rates) -> Result<()> {
        start_all(&self.schedules, progress, rates)
    }

    fn next(&self, progress: &mut Progress, rates: &mut Rates) -> Result<()> {
        let parts = self.schedules.iter().zip(&mut progress.parts);
        parts.into_iter().try_for_each(|(schedule, part)| schedule.advance(part, rates))
    }

    fn compare(&self, _progress: &Progress, _saved: &SavedState<'_>) -> Result<()> {
        Ok(()) // its parts have the options
    }
}

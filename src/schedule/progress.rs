//! How far a schedule has come, and the rule by which it goes on.

use serde::{Deserialize, Serialize};

use crate::checkpoint::SavedState;
use crate::error::{Error, Result, shown};
use crate::schedule::Rates;
use crate::schedule::Schedule;

/// The state of a schedule, with PyTorch's names.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Progress {
    /// The steps taken since the schedule began.
    #[serde(rename = "last_epoch")]
    pub(super) last: u64,
    /// The learning rates from which the schedule computes.
    #[serde(rename = "base_lrs")]
    pub(super) bases: Vec<f64>,
    /// The cycle of [`CosineAnnealingWarmRestarts`](crate::schedule::CosineAnnealingWarmRestarts).
    #[serde(flatten)]
    pub(super) cycle: Option<Cycle>,
    /// The states of the schedules that this one combines.
    #[serde(rename = "_schedulers", skip_serializing_if = "Vec::is_empty")]
    pub(super) parts: Vec<Progress>,
}

/// A cycle of annealing.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Cycle {
    /// The steps since its start.
    #[serde(rename = "T_cur")]
    pub(super) position: u64,
    /// Its length in steps.
    #[serde(rename = "T_i")]
    pub(super) length: u64,
}

/// The arithmetic of a schedule. The rates are the optimizer's present ones, which it changes.
pub(super) trait Rule {
    /// Checks the options, for an optimizer with these rates.
    fn check(&self, rates: &Rates) -> Result<()>;

    /// Changes what the schedule begins with, before it takes the bases from the rates.
    fn prepare(&self, _rates: &mut Rates) {}

    /// Sets the first rates. `progress.last` is 0.
    fn first(&self, progress: &mut Progress, rates: &mut Rates) -> Result<()>;

    /// Sets the rates after a step, which `progress.last` counts already.
    fn next(&self, progress: &mut Progress, rates: &mut Rates) -> Result<()>;

    /// Compares the options in a state of Python with those here. `progress` was read from the state.
    fn compare(&self, progress: &Progress, saved: &SavedState<'_>) -> Result<()>;
}

/// A schedule that may be a part of a sequence.
pub(super) trait Part: Rule {
    /// Sets the first rates when a sequence comes to this schedule, independently of the rates before.
    fn restart(&self, progress: &mut Progress, rates: &mut Rates);
}

macro_rules! dispatch {
    ($($part:ident)*) => {
        impl Schedule {
            pub(super) fn rule(&self) -> &dyn Rule {
                match self {
                    $(Self::$part(rule) => rule,)*
                    Self::SequentialLr(rule) => rule,
                    Self::ChainedScheduler(rule) => rule,
                }
            }

            pub(super) fn part(&self) -> Option<&dyn Part> {
                match self {
                    $(Self::$part(part) => Some(part),)*
                    Self::SequentialLr(_) | Self::ChainedScheduler(_) => None,
                }
            }
        }
    };
}

dispatch!(
    StepLr MultiStepLr ConstantLr LinearLr ExponentialLr PolynomialLr CosineAnnealingLr CosineAnnealingWarmRestarts
    OneCycleLr InverseSqrtLr LinearWithWarmup
);

impl Schedule {
    /// Checks the options, begins the schedule and sets its first rates.
    pub(super) fn start(&self, rates: &mut Rates) -> Result<Progress> {
        let rule = self.rule();
        rule.check(rates)?;
        rule.prepare(rates);
        let mut progress =
            Progress { last: 0, bases: rates.initial.clone(), cycle: None, parts: Vec::new() };
        rule.first(&mut progress, rates)?;
        Ok(progress)
    }

    /// Advances by a step and sets the next rates.
    pub(super) fn advance(&self, progress: &mut Progress, rates: &mut Rates) -> Result<()> {
        progress.last = progress.last.saturating_add(1);
        self.rule().next(progress, rates)?;
        // Rounding may end a line to 0 slightly below it, and in a chain a part continues from what another one has
        // set.
        rates.lrs.iter_mut().filter(|lr| **lr < 0.0).for_each(|lr| *lr = 0.0);
        Ok(())
    }

    /// The schedules that this one combines.
    fn parts(&self) -> &[Schedule] {
        match self {
            Self::SequentialLr(sequence) => sequence.schedules(),
            Self::ChainedScheduler(chain) => chain.schedules(),
            _ => &[],
        }
    }

    /// Returns an error for a state of a `LambdaLR`, unless this is a schedule that Python has as one.
    fn refuse_function(&self, saved: &SavedState<'_>) -> Result<()> {
        const FUNCTIONS: &str = "lr_lambdas";
        let is_one = matches!(self, Self::LinearWithWarmup(_) | Self::InverseSqrtLr(_));
        if is_one || !saved.contains(FUNCTIONS)? {
            return Ok(());
        }
        let problem = format!(
            "is of a `LambdaLR`, whose function is not in the file, and which only `LinearWithWarmup` and \
             `InverseSqrtLr` can be; {}",
            instead(saved, "last_epoch")
        );
        Err(saved.wrong(FUNCTIONS, problem))
    }

    /// Returns whether a loaded state can be that of this schedule for this number of groups.
    pub(super) fn fits(&self, progress: &Progress, groups: usize) -> bool {
        let parts = self.parts();
        let has_cycle = matches!(self, Self::CosineAnnealingWarmRestarts(_));
        let is_inside = |cycle: Cycle| cycle.position < cycle.length;
        let cycle_fits =
            progress.cycle.is_some() == has_cycle && progress.cycle.is_none_or(is_inside);
        let bases = &progress.bases;
        cycle_fits
            && bases.len() == groups
            && bases.iter().all(|base| base.is_finite())
            && progress.parts.len() == parts.len()
            && parts.iter().zip(&progress.parts).all(|(part, state)| part.fits(state, groups))
    }
}

/// The entries that Python saves for itself: how often it was stepped, which calls it warns of, and the rates that a
/// part of another schedule gave last.
const OF_PYTHON: &[&str] =
    &["_get_lr_called_within_step", "_is_initial", "_last_lr", "_step_count", "verbose"];

impl Progress {
    /// Reads the state of a schedule that has begun. Python saves the options beside it, which are compared.
    pub(super) fn read(&mut self, schedule: &Schedule, saved: &SavedState<'_>) -> Result<()> {
        let parts = schedule.parts();
        if saved.is_strict() || !parts.is_empty() {
            schedule.refuse_function(saved)?;
        }
        for (i, (schedule, part)) in parts.iter().zip(&mut self.parts).enumerate() {
            saved.within(&format!("_schedulers.{i}"), |saved| part.read(schedule, saved))?;
        }
        if saved.contains_within(&format!("_schedulers.{}", parts.len())) {
            return refuse(format!("has more parts than this schedule, which has {}", parts.len()));
        }
        // In Python a chain counts no steps, a part of a sequence that has not begun is at -1, and neither a chain nor
        // a sequence has learning rates of its own.
        let is_chain = matches!(schedule, Schedule::ChainedScheduler(_));
        self.last = match self.parts.first() {
            Some(first) if is_chain && !saved.contains("last_epoch")? => first.last,
            _ if matches!(saved.value::<i64>("last_epoch"), Ok(-1)) => 0,
            _ => saved.value("last_epoch")?,
        };
        if self.parts.is_empty() || saved.contains("base_lrs")? {
            let bases: Vec<f64> = saved.value("base_lrs")?;
            if bases.len() != self.bases.len() {
                let (saved, here) = (bases.len(), self.bases.len());
                return refuse(format!(
                    "has learning rates of {saved} groups, and the optimizer {here}"
                ));
            }
            self.bases = bases;
        }
        if let Some(cycle) = &mut self.cycle {
            // Python's is a fraction after `step(epoch)` with one, and an integral float after that with none.
            let position: f64 = saved.value("T_cur")?;
            if !(position.fract() == 0.0 && position >= 0.0) {
                return refuse(format!(
                    "is {position} steps into a cycle; schedules here take whole steps"
                ));
            }
            cycle.position = position as u64;
            cycle.length = saved.value("T_i")?;
        }
        saved.leave_out_unread(OF_PYTHON);
        // A state of this crate has no options, so that the schedule can be made longer.
        if !saved.contains("_step_count")? && !saved.contains("_milestones")? {
            return Ok(());
        }
        schedule.rule().compare(self, saved)
    }
}

/// How to go on from a state of another program, given the name of its number of steps.
pub(super) fn instead(saved: &SavedState<'_>, steps: &str) -> String {
    let name = saved.name();
    // A part of a sequence counts from its milestone, and a chain does not count.
    let whole = name.split_once("._schedulers.").map(|(whole, _)| whole);
    let whole = whole.filter(|whole| saved.is_in_checkpoint(&format!("{whole}.{steps}")));
    let steps = format!("{}.{steps}", whole.unwrap_or(name));
    format!(
        "build the schedule, advance it as often as the value `{}` says, and then restore the optimizer",
        shown(&steps)
    )
}

/// Returns an error for a state of mmengine, whose schedules act between two steps and may be in epochs.
pub(super) fn refuse_mmengine(saved: &SavedState<'_>) -> Result<()> {
    const STEPS: &str = "_global_step";
    if !(saved.contains(STEPS)? && saved.contains("base_values")?) {
        return Ok(());
    }
    let instead = instead(saved, STEPS);
    let problem = format!("is of a schedule of mmengine, which is not one of PyTorch; {instead}");
    Err(saved.wrong(STEPS, problem))
}

fn refuse<T>(problem: String) -> Result<T> {
    Err(Error::InvalidArgument { name: "the scheduler's state", problem })
}

/// Returns an error unless a count of steps is positive.
pub(super) fn at_least_one(name: &'static str, count: u64) -> Result<()> {
    if count > 0 { Ok(()) } else { Err(Error::out_of_range(name, 0.0, "at least 1")) }
}

/// The numbers that change as the schedule advances.
#[derive(Clone, Debug)]
pub(super) struct State {
    pub(super) progress: Progress,
    pub(super) rates: Rates,
}

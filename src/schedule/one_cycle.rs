//! The one-cycle schedule, which also cycles the momentum.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::checkpoint::SavedState;
use crate::error::{Error, Result, ensure};
use crate::schedule::Rates;
use crate::schedule::progress::{Part, Progress, Rule, at_least_one};

/// Raises the learning rate from `max_lr / div_factor` to `max_lr` and lowers it far below where it began, while the
/// momentum falls and rises. The counterpart of `torch.optim.lr_scheduler.OneCycleLR`, with its defaults.
///
/// The learning rate of the optimizer is replaced. The momentum is that of SGD and Muon, or the first beta of Adam and
/// AdamW. The schedule may be advanced `total_steps` times, as in PyTorch; once more is an error. The last advance
/// keeps the last learning rate and momentum; PyTorch extrapolates the curve there, and a linear one becomes negative.
///
/// Source: Smith and Topin, *Super-Convergence: Very Fast Training of Neural Networks Using Large Learning Rates*,
/// <https://arxiv.org/abs/1708.07120>.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OneCycleLr {
    /// The largest learning rate: one for all groups, or one for each.
    pub max_lr: Vec<f64>,
    /// The number of steps of the cycle; at least 1.
    pub total_steps: u64,
    /// The share of the steps that raise the learning rate, from 0 to 1. Defaults to 0.3.
    #[serde(default = "defaults::pct_start")]
    pub pct_start: f64,
    /// The shape of the curve. Defaults to the cosine.
    #[serde(default)]
    pub anneal_strategy: Annealing,
    /// Whether the momentum goes from `max_momentum` to `base_momentum` and back. Defaults to `true`.
    #[serde(default = "defaults::cycle_momentum")]
    pub cycle_momentum: bool,
    /// The momentum at the largest learning rate. Defaults to 0.85.
    #[serde(default = "defaults::base_momentum")]
    pub base_momentum: f64,
    /// The momentum at the start and at the end. Defaults to 0.95.
    #[serde(default = "defaults::max_momentum")]
    pub max_momentum: f64,
    /// The first learning rate is `max_lr / div_factor`. More than 0; defaults to 25.
    #[serde(default = "defaults::div_factor")]
    pub div_factor: f64,
    /// The last learning rate is the first one divided by `final_div_factor`. More than 0; defaults to 1e4.
    #[serde(default = "defaults::final_div_factor")]
    pub final_div_factor: f64,
    /// Whether the learning rate first returns to its start, symmetrically, before it is lowered to the end. Defaults
    /// to `false`.
    #[serde(default)]
    pub three_phase: bool,
}

/// The shape of the curve between two values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Annealing {
    /// Half a cosine.
    #[default]
    Cos,
    /// A straight line.
    Linear,
}

mod defaults {
    pub(super) fn pct_start() -> f64 {
        0.3
    }

    pub(super) fn cycle_momentum() -> bool {
        true
    }

    pub(super) fn base_momentum() -> f64 {
        0.85
    }

    pub(super) fn max_momentum() -> f64 {
        0.95
    }

    pub(super) fn div_factor() -> f64 {
        25.0
    }

    pub(super) fn final_div_factor() -> f64 {
        1e4
    }
}

/// A part of the cycle: its last step, and the places of its values in the lists of levels.
struct Phase {
    end: f64,
    lr: [usize; 2],
    momentum: [usize; 2],
}

/// The levels between which a cycle moves, by their places in the lists.
const START: usize = 0;
const PEAK: usize = 1;
const END: usize = 2;

impl Annealing {
    fn between(self, [start, end]: [f64; 2], share: f64) -> f64 {
        match self {
            Self::Cos => end + (start - end) / 2.0 * ((PI * share).cos() + 1.0),
            Self::Linear => (end - start) * share + start,
        }
    }
}

impl OneCycleLr {
    /// Makes the options of a cycle with one largest learning rate for all groups.
    pub fn new(max_lr: f64, total_steps: u64) -> Self {
        Self {
            max_lr: vec![max_lr],
            total_steps,
            pct_start: defaults::pct_start(),
            anneal_strategy: Annealing::Cos,
            cycle_momentum: defaults::cycle_momentum(),
            base_momentum: defaults::base_momentum(),
            max_momentum: defaults::max_momentum(),
            div_factor: defaults::div_factor(),
            final_div_factor: defaults::final_div_factor(),
            three_phase: false,
        }
    }

    /// The largest learning rate of a group.
    fn peak(&self, group: usize) -> f64 {
        self.max_lr[if self.max_lr.len() == 1 { 0 } else { group }]
    }

    /// The first learning rate of a group.
    fn start(&self, group: usize) -> f64 {
        self.peak(group) / self.div_factor
    }

    fn phases(&self) -> Vec<Phase> {
        let total = self.total_steps as f64;
        let rise =
            Phase { end: self.pct_start * total - 1.0, lr: [START, PEAK], momentum: [START, PEAK] };
        if self.three_phase {
            let fall = 2.0 * self.pct_start * total - 2.0;
            let fall = Phase { end: fall, lr: [PEAK, START], momentum: [PEAK, START] };
            let last = Phase { end: total - 1.0, lr: [START, END], momentum: [START, START] };
            vec![rise, fall, last]
        } else {
            let fall = Phase { end: total - 1.0, lr: [PEAK, END], momentum: [PEAK, START] };
            vec![rise, fall]
        }
    }

    /// The phase of a step, and the share of the phase that lies before the step.
    fn phase(&self, step: u64) -> (Phase, f64) {
        let (step, mut start) = (step as f64, 0.0);
        let mut phases = self.phases();
        let last = phases.len() - 1;
        let index = phases[..last].iter().position(|phase| step <= phase.end).unwrap_or(last);
        if index > 0 {
            start = phases[index - 1].end;
        }
        let phase = phases.swap_remove(index);
        let share = (step - start) / (phase.end - start);
        (phase, share)
    }

    fn set(&self, progress: &Progress, rates: &mut Rates) {
        // After the last step PyTorch goes on along the curve, on a line below 0.
        let (phase, share) = self.phase(progress.last.min(self.total_steps - 1));
        let between = |[from, to]: [usize; 2], levels: [f64; 3]| {
            self.anneal_strategy.between([levels[from], levels[to]], share)
        };
        for (group, (lr, base)) in rates.lrs.iter_mut().zip(&progress.bases).enumerate() {
            *lr = between(phase.lr, [*base, self.peak(group), base / self.final_div_factor]);
        }
        if self.cycle_momentum {
            let levels = [self.max_momentum, self.base_momentum, self.max_momentum];
            rates.momenta.fill(Some(between(phase.momentum, levels)));
        }
    }

    fn check_momentum(&self, rates: &Rates) -> Result<()> {
        for (name, momentum) in
            [("base_momentum", self.base_momentum), ("max_momentum", self.max_momentum)]
        {
            ensure(name, momentum, (0.0..1.0).contains(&momentum), "from 0 to below 1")?;
        }
        if rates.momenta.iter().any(Option::is_none) {
            let problem = "is set, but the groups have no momentum; set it to false".to_owned();
            return Err(Error::InvalidArgument { name: "cycle_momentum", problem });
        }
        Ok(())
    }
}

/// The name of the length of the first phase in older files.
const UP: &str = "step_size_up";

impl Rule for OneCycleLr {
    fn check(&self, rates: &Rates) -> Result<()> {
        at_least_one("total_steps", self.total_steps)?;
        let (groups, given) = (rates.lrs.len(), self.max_lr.len());
        if given != 1 && given != groups {
            let problem =
                format!("has {given} numbers, but must have 1 or, for each group, {groups}");
            return Err(Error::InvalidArgument { name: "max_lr", problem });
        }
        for &lr in &self.max_lr {
            ensure("max_lr", lr, lr >= 0.0 && lr.is_finite(), "finite and at least 0")?;
        }
        for (name, factor) in
            [("div_factor", self.div_factor), ("final_div_factor", self.final_div_factor)]
        {
            ensure(name, factor, factor > 0.0 && factor.is_finite(), "finite and more than 0")?;
        }
        let share = self.pct_start;
        ensure("pct_start", share, (0.0..=1.0).contains(&share), "from 0 to 1")?;
        // PyTorch divides by zero at the first step.
        if self.phases()[0].end == 0.0 {
            let problem = "makes a phase without steps; change it or `total_steps`".to_owned();
            return Err(Error::InvalidArgument { name: "pct_start", problem });
        }
        if self.cycle_momentum { self.check_momentum(rates) } else { Ok(()) }
    }

    fn prepare(&self, rates: &mut Rates) {
        rates.initial = (0..rates.initial.len()).map(|group| self.start(group)).collect();
    }

    fn first(&self, progress: &mut Progress, rates: &mut Rates) -> Result<()> {
        self.set(progress, rates);
        Ok(())
    }

    fn next(&self, progress: &mut Progress, rates: &mut Rates) -> Result<()> {
        let (steps, total) = (progress.last, self.total_steps);
        if steps > total {
            let problem = format!("is {total}, but the schedule was stepped {steps} times");
            return Err(Error::InvalidArgument { name: "total_steps", problem });
        }
        self.set(progress, rates);
        Ok(())
    }

    fn compare(&self, progress: &Progress, saved: &SavedState<'_>) -> Result<()> {
        let lr = |level| ["initial_lr", "max_lr", "min_lr"][level];
        let momentum = |level| ["max_momentum", "base_momentum", "max_momentum"][level];
        let phase = |Phase { end, lr: [a, b], momentum: [c, d] }| {
            json!({
                "end_step": end, "start_lr": lr(a), "end_lr": lr(b),
                "start_momentum": momentum(c), "end_momentum": momentum(d),
            })
        };
        let phases: Vec<_> = self.phases().into_iter().map(phase).collect();
        saved.leave_out_unread(&["anneal_func", "use_beta1"]);
        saved.option("total_steps", &self.total_steps)?;
        // Older versions of PyTorch had two phases, and saved their lengths.
        if saved.contains(UP)? {
            let ends: Vec<_> = self.phases().iter().map(|phase| phase.end).collect();
            let down = match ends[..] {
                [up, _] => self.total_steps as f64 - up - 1.0,
                _ => ends[2] - ends[1],
            };
            saved.option(UP, &ends[0])?;
            saved.option("step_size_down", &down)?;
        } else {
            saved.option("_schedule_phases", &phases)?;
        }
        // Some saved the curve as a function, which is not in the file. The last rates are on it.
        if !saved.contains("anneal_func")? {
            saved.option("_anneal_func_type", &self.anneal_strategy)?;
        }
        saved.option("cycle_momentum", &self.cycle_momentum)?;
        let bases: Vec<_> = (0..progress.bases.len()).map(|group| self.start(group)).collect();
        saved.option("base_lrs", &bases)?;
        if progress.last >= self.total_steps {
            return Ok(()); // Python is beyond the curve
        }
        let mut rates = Rates::of_lrs(&bases)?;
        self.set(progress, &mut rates);
        saved.option("_last_lr", &rates.lrs)
    }
}

impl Part for OneCycleLr {
    fn restart(&self, progress: &mut Progress, rates: &mut Rates) {
        self.set(progress, rates);
    }
}

//! The region of a training, with the plan under which its iterations are fastest, if that is wanted.

use super::{Options, Ranks};
use anyhow::Result;
use tch::Tensor;
use tch::nn::VarStore;
use tch_amp::autocast::Plan;
use tch_amp::checkpoint::Checkpoint;
use tch_amp::insight::Tuner;
use tch_amp::{Autocast, GradScaler};

/// The part of a checkpoint with the plan.
const PLAN: &str = "plan";

/// The region of a training.
#[derive(Debug)]
pub struct Region {
    /// Without a plan.
    plain: Autocast,
    /// With the plan, if there is one.
    now: Autocast,
    /// Whether a plan is wanted.
    is_wanted: bool,
    plan: Option<Plan>,
}

impl Region {
    /// Starts with a region without a plan.
    pub fn new(plain: Autocast, options: &Options) -> Self {
        Self { plain, now: plain, is_wanted: options.has_plan(), plan: None }
    }

    /// The region itself.
    pub fn autocast(&self) -> Autocast {
        self.now
    }

    /// Runs a part of a program in the region.
    pub fn run<T>(&self, f: impl FnOnce() -> T) -> tch_amp::Result<T> {
        self.now.run(f)
    }

    /// The same for a part that can fail.
    pub fn try_run<T>(&self, f: impl FnOnce() -> tch_amp::Result<T>) -> tch_amp::Result<T> {
        self.now.try_run(f)
    }

    /// Measures on the first rank which plan is fastest, for all ranks, and says in a line what it does; nothing if no
    /// plan is wanted. The plan of a checkpoint is kept, unless a rank is on another kind of machine than it is for.
    /// `loss` makes the loss of a batch, and must not communicate.
    pub fn tune<L: FnMut(Autocast) -> tch_amp::Result<Tensor>>(
        &mut self,
        ranks: &Ranks,
        vs: &VarStore,
        scaler: &GradScaler,
        loss: impl FnOnce() -> Result<L>,
    ) -> Result<Option<String>> {
        if !self.is_wanted || (self.plan.is_some() && self.takes_plan(ranks)?) {
            return Ok(None);
        }
        let (plan, summary) = ranks.from_first(|| {
            let tuning = Tuner::default().tune(vs, &self.plain, scaler, loss()?)?;
            Ok((tuning.plan.clone(), tuning.summary()))
        })?;
        self.plan = Some(plan);
        Ok(Some(match self.takes_plan(ranks)? {
            true => summary,
            false => "no plan, because the ranks are on different kinds of machines".to_owned(),
        }))
    }

    /// Whether the plan keeps the whole model in f32.
    pub fn is_planned_f32(&self) -> bool {
        self.plan.as_ref().is_some_and(|plan| plan.dtype.is_none())
    }

    /// Takes the plan if it holds on all ranks, and no plan otherwise.
    fn takes_plan(&mut self, ranks: &Ranks) -> Result<bool> {
        let planned = self.plan.as_ref().and_then(|plan| self.plain.plan(plan).ok());
        let is_refused = ranks.any(planned.is_none())?;
        self.now = planned.filter(|_| !is_refused).unwrap_or(self.plain);
        Ok(!is_refused)
    }

    /// Adds the plan to a checkpoint: the run goes on with it, and so with the same numbers.
    pub fn save(&self, checkpoint: &mut Checkpoint) -> tch_amp::Result<()> {
        self.plan.as_ref().map_or(Ok(()), |plan| checkpoint.add_value(PLAN, plan))
    }

    /// Takes over what [`save`](Self::save) has added, for [`tune`](Self::tune).
    pub fn restore(&mut self, checkpoint: &Checkpoint) -> tch_amp::Result<()> {
        if checkpoint.contains(PLAN) {
            self.plan = Some(checkpoint.value(PLAN)?);
        }
        Ok(())
    }
}

//! The region of a training, with the plan under which its iterations are fastest, if that is wanted.

use super::{Options, Ranks};
use anyhow::Result;
use tch::Tensor;
use tch::nn::VarStore;
use tch_amp::autocast::Plan;
use tch_amp::checkpoint::Checkpoint;
use tch_amp::insight::tune;
use tch_amp::{Autocast, Error, GradScaler};

/// The part of a checkpoint with the plan.
const PLAN: &str = "plan";

/// The region of a training.
#[derive(Debug)]
pub struct Region {
    plain: Autocast,
    /// Whether to measure a plan.
    tunes: bool,
    plan: Option<Plan>,
}

impl Region {
    /// Starts with a region without a plan.
    pub fn new(plain: Autocast, options: &Options) -> Self {
        Self { plain, tunes: options.tunes, plan: None }
    }

    /// The region, with the plan if there is one.
    pub fn get(&self) -> tch_amp::Result<Autocast> {
        self.plan.as_ref().map_or(Ok(self.plain), |plan| self.plain.plan(plan))
    }

    /// Runs a part of a program in the region.
    pub fn run<T>(&self, f: impl FnOnce() -> T) -> tch_amp::Result<T> {
        self.get()?.run(f)
    }

    /// Measures on the first rank which plan is fastest, for all ranks, and says in a line what it does; nothing if no
    /// plan is wanted, or a checkpoint had one. `loss` must not communicate.
    pub fn tune(
        &mut self,
        ranks: &Ranks,
        vs: &VarStore,
        scaler: &GradScaler,
        loss: impl FnMut(Autocast) -> tch_amp::Result<Tensor>,
    ) -> Result<Option<String>> {
        if !self.tunes || self.plan.is_some() {
            return Ok(None);
        }
        let (plan, summary) = ranks.from_first(|| {
            let tuning = tune(vs, &self.plain, scaler, loss)?;
            Ok((tuning.plan.clone(), tuning.summary()))
        })?;
        self.plan = Some(plan);
        Ok(Some(summary))
    }

    /// Adds the plan to a checkpoint: the run goes on with it, and so with the same numbers.
    pub fn save(&self, checkpoint: &mut Checkpoint) -> tch_amp::Result<()> {
        self.plan.as_ref().map_or(Ok(()), |plan| checkpoint.add_value(PLAN, plan))
    }

    /// Takes over what [`save`](Self::save) has added. On another kind of machine the plan is measured again.
    pub fn restore(&mut self, checkpoint: &Checkpoint) -> tch_amp::Result<()> {
        if !self.tunes || !checkpoint.contains(PLAN) {
            return Ok(());
        }
        let plan = checkpoint.value(PLAN)?;
        match self.plain.plan(&plan) {
            Ok(_) => self.plan = Some(plan),
            Err(Error::Autocast(_)) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

//! Optimizers whose state is divided among ranks, each of which steps a part of the parameters. This is stage 1 of
//! ZeRO.
//!
//! Source: Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*,
//! <https://arxiv.org/abs/1910.02054>.

use std::sync::Arc;

use tch::{Device, Kind};
use xxhash_rust::xxh3::Xxh3Default;

use crate::error::{Error, Result};
use crate::ffi;
use crate::optim::shards::{Ranks, Shards};
use crate::optim::state::{ParameterState, used};
use crate::optim::{MasterWeights, Optimizer, Step};

impl Optimizer {
    /// Divides the state among ranks. The tensors that others keep are dropped.
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
        let modes = (self.masters, self.states, &self.groups);
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

    /// What [`hash`](Self::hash) stands for, with a line for each group and parameter.
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
        let masters = format!("master weights {:?}, states {:?}\n", self.masters, self.states);
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
            slot.elsewhere = *owner != here;
            if slot.elsewhere {
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
        let (count, kept_as) = (ffi::numel(parameter) as u64, self.states.of(parameter));
        let masters = count.saturating_mul(master.kind().map_or(0, bytes));
        let used = used(&self.algorithm(index), kept_as);
        let moments = used.into_iter().filter(|used| *used).count() as u64;
        kept_as.moment_bytes(count, moments, moment).saturating_add(masters).max(count)
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

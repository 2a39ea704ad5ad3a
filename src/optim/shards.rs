//! The division of a state among ranks.

use std::cmp::Reverse;
use std::fmt::Debug;
use std::sync::Arc;

use tch::Tensor;

use crate::error::Result;
use crate::optim::OptimizerState;

/// The ranks that divide the state of an optimizer among them.
pub(crate) trait Ranks: Debug + Send + Sync {
    fn rank(&self) -> usize;

    fn size(&self) -> usize;

    /// The number of their group, which no other group of this process has.
    fn group(&self) -> u64;

    /// Fails on all ranks if one of them passes an error, or another hash. `lines` has the lines that it stands for.
    fn agree(
        &self,
        call: &'static str,
        hash: Result<u64>,
        lines: &dyn Fn() -> String,
    ) -> Result<()>;

    /// Makes the other ranks fail, which would wait for this one.
    fn close(&self);

    /// Overwrites each tensor by the one of its owner.
    fn share(&self, tensors: &[Tensor], owners: &[usize]) -> Result<()>;

    /// Adds the tensors of the other ranks to the state on rank 0, or fails on all ranks if one of them passes an
    /// error.
    fn gather_state(&self, state: Result<OptimizerState>) -> Result<OptimizerState>;
}

/// Which rank steps each parameter.
#[derive(Debug)]
pub(crate) struct Shards {
    ranks: Arc<dyn Ranks>,
    owners: Vec<usize>,
    /// The bytes of state that each rank keeps.
    loads: Vec<u64>,
}

impl Shards {
    pub(super) fn new(ranks: Arc<dyn Ranks>) -> Self {
        let loads = vec![0; ranks.size()];
        Self { ranks, owners: Vec::new(), loads }
    }

    pub(super) fn ranks(&self) -> Arc<dyn Ranks> {
        self.ranks.clone()
    }

    /// The rank that steps each parameter.
    pub(super) fn owners(&self) -> &[usize] {
        &self.owners
    }

    /// Gives each of the parameters that begin at `first` to the rank that keeps least so far, the largest ones first.
    pub(super) fn assign(&mut self, first: usize, sizes: &[u64]) {
        self.owners.truncate(first);
        self.owners.extend(divided(sizes, &mut self.loads));
    }
}

/// Gives each of these sizes to the rank that has least so far, the largest ones first. Returns the rank of each.
pub(crate) fn divided(sizes: &[u64], loads: &mut [u64]) -> Vec<usize> {
    let mut owners = vec![0; sizes.len()];
    let mut order: Vec<_> = (0..sizes.len()).collect();
    order.sort_by_key(|&index| Reverse(sizes[index]));
    for index in order {
        // The first of equals, so that all ranks choose the same.
        let owner = (0..loads.len()).min_by_key(|&rank| loads[rank]).unwrap_or(0);
        owners[index] = owner;
        loads[owner] += sizes[index];
    }
    owners
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Four;

    impl Ranks for Four {
        fn rank(&self) -> usize {
            0
        }

        fn size(&self) -> usize {
            4
        }

        fn group(&self) -> u64 {
            4
        }

        fn agree(&self, _: &'static str, hash: Result<u64>, _: &dyn Fn() -> String) -> Result<()> {
            hash.map(drop)
        }

        fn close(&self) {}

        fn share(&self, _: &[Tensor], _: &[usize]) -> Result<()> {
            Ok(())
        }

        fn gather_state(&self, state: Result<OptimizerState>) -> Result<OptimizerState> {
            state
        }
    }

    #[test]
    fn the_largest_parameters_go_first_to_the_rank_that_has_least() {
        let mut shards = Shards::new(Arc::new(Four));
        shards.assign(0, &[1, 9, 2, 8, 7, 3, 6]);
        assert_eq!(shards.owners, [1, 0, 2, 1, 2, 3, 3]);
        assert_eq!(shards.loads, [9, 9, 9, 9]);
        shards.assign(7, &[5, 4]);
        assert_eq!(shards.owners[7..], [0, 1]);
        assert_eq!(shards.loads, [14, 13, 9, 9]);
    }
}

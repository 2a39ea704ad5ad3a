//! Different random numbers on each rank.

use crate::distributed::group::ProcessGroup;

impl ProcessGroup {
    /// Seeds the default random number generators of this rank's process, those of the CPU and of all GPUs, with `seed`
    /// plus [`rank`](Self::rank), so that dropout and augmentation draw different numbers on each rank. Nothing is
    /// communicated. Corresponds to `torch.manual_seed(seed + rank)`.
    ///
    /// Rank 1 with seed 0 draws the same numbers as rank 0 with seed 1: keep the seeds of independent runs further
    /// apart than the number of ranks. The weights of new models also differ between ranks, until a
    /// [`DistributedDataParallel`](crate::distributed::DistributedDataParallel) copies those of rank 0.
    ///
    /// Ranks that are threads of one process share its generators. The last seed counts for all of them, and which
    /// rank draws which numbers depends on timing. Use processes where random numbers have to be reproducible.
    pub fn manual_seed(&self, seed: i64) {
        tch::manual_seed(seed.wrapping_add_unsigned(self.rank() as u64));
    }
}

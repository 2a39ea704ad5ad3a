//! Checkpoints that the ranks of a group save together.

use std::sync::Arc;

use crate::checkpoint::{Checkpoint, Exchange, SavingRanks};
use crate::distributed::ProcessGroup;
use crate::distributed::turns::Turn;
use crate::error::{DistributedError, Error, Result};

impl Checkpoint {
    /// Creates an empty checkpoint that the ranks of a group save together: each rank writes a share of it, at the same
    /// time as the others, instead of rank 0 everything. Corresponds to `torch.distributed.checkpoint.save` on several
    /// ranks; `torch.distributed.checkpoint.load` reads the result, with a `HuggingFaceStorageReader` if the format is
    /// [`Format::Safetensors`](crate::checkpoint::Format::Safetensors).
    ///
    /// All ranks add the same parts, and then all of them call [`save_as`](Self::save_as), or
    /// [`CheckpointFolder::save`](crate::checkpoint::CheckpointFolder::save),
    /// [`save_async`](crate::checkpoint::CheckpointFolder::save_async) or one of the others, with
    /// [`Format::Dcp`](crate::checkpoint::Format::Dcp) or
    /// [`Format::Safetensors`](crate::checkpoint::Format::Safetensors) and a path that all ranks reach. They make a
    /// folder there; the other formats are refused with
    /// [`CheckpointError::Unsaveable`](crate::checkpoint::CheckpointError::Unsaveable). A rank copies and writes only
    /// what it saves:
    ///
    /// | what | who saves it |
    /// |---|---|
    /// | an optimizer after [`shard_over`](crate::optim::Optimizer::shard_over) with the same group | each rank saves the state that it keeps, and nothing is gathered |
    /// | trainable weights and their averages, other optimizers | each tensor is saved by one rank, so that all write about as much; they must be the same on all ranks, as those of a [`DistributedDataParallel`](crate::distributed::DistributedDataParallel) are |
    /// | frozen weights, running statistics, scalers, generators, values and everything else | rank 0 saves its own |
    ///
    /// Rank 0 writes the index after the files of all ranks are on the disk. Whichever rank ends in between, the
    /// checkpoint is complete or not there, and the last one before stays; a later save removes the files of the
    /// interrupted one, an hour after they were written. [`Checkpoint::load`] reads the result on any number of ranks,
    /// or without any. Restore a saved checkpoint and not this one, which has only the state of this rank.
    ///
    /// A save blocks until all ranks have called it, and returns when the index is in place. With `save_async` that is
    /// when [`PendingSave::wait`](crate::checkpoint::PendingSave::wait) returns; the ranks then communicate through a
    /// group of their own, with the same timeout, within which all ranks have to finish writing: a
    /// [`max_write_rate`](crate::checkpoint::CheckpointFolder::max_write_rate) must leave enough time. After a failed
    /// communication of that group, use `save`, or a new group.
    ///
    /// An error of one rank is an error on all: its own there, and [`DistributedError::Rank`] with its message on the
    /// others; [`DistributedError::Mismatch`] if they save different checkpoints. The group can still be used then. What
    /// [`refuse_while_saving`](crate::checkpoint::CheckpointFolder::refuse_while_saving) refuses is refused on all
    /// ranks. Two errors are returned on rank 0 alone, after the checkpoint is in place. Rank 0 must go on then,
    /// because the other ranks do: [`CheckpointError::NotRemoved`] and [`CheckpointError::Indeterminate`].
    ///
    /// [`CheckpointError::NotRemoved`]: crate::checkpoint::CheckpointError::NotRemoved
    /// [`CheckpointError::Indeterminate`]: crate::checkpoint::CheckpointError::Indeterminate
    /// [`DistributedError::Rank`]: crate::distributed::DistributedError::Rank
    /// [`DistributedError::Mismatch`]: crate::distributed::DistributedError::Mismatch
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Device, nn};
    /// use tch_amp::checkpoint::{Checkpoint, CheckpointFolder, Format};
    /// use tch_amp::distributed::{ProcessGroup, Store};
    ///
    /// # let path = std::env::temp_dir().join(format!("tch-amp-doc-sharded-{}", std::process::id()));
    /// # let group = ProcessGroup::new(&Store::in_process()?, 0, 1)?;
    /// let vs = nn::VarStore::new(Device::Cpu);
    /// nn::linear(vs.root(), 4, 2, Default::default());
    /// let mut folder = CheckpointFolder::new(&path)?.keep_last(2).format(Format::Dcp);
    /// for step in 1..=3 {
    ///     // ... train ...
    ///     let mut checkpoint = Checkpoint::sharded(&group);
    ///     checkpoint.add("model", &vs)?;
    ///     checkpoint.add_value("step", &step)?;
    ///     folder.save(step, &checkpoint)?;
    /// }
    /// let found = folder.latest()?.ok_or("nothing was saved")?;
    /// found.checkpoint.restore().add("model", &vs).apply()?;
    /// assert_eq!(found.checkpoint.value::<u64>("step")?, 3);
    /// # std::fs::remove_dir_all(path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn sharded(group: &ProcessGroup) -> Self {
        Self::of_ranks(Arc::new(group.clone()))
    }
}

impl SavingRanks for ProcessGroup {
    fn in_background(&self) -> Result<Box<dyn Exchange>> {
        let saves = self.saves()?;
        let turn = saves.turns().take();
        Ok(Box::new(InTurn { saves, turn }))
    }
}

impl Exchange for ProcessGroup {
    fn rank(&self) -> usize {
        Self::rank(self)
    }

    fn exchange(&self, at: &str, mine: std::result::Result<String, String>) -> Result<Vec<String>> {
        const CALL: &str = "the save of a sharded checkpoint";
        self.tell(CALL, &format!("{CALL} {at}"), mine)
    }

    fn is_known_to_all(&self, error: &Error) -> bool {
        match error {
            Error::Distributed(error) => matches!(error, DistributedError::Rank { .. }),
            _ => true,
        }
    }
}

/// A save in the background: threads of several saves would communicate in another order on each rank, and so they take
/// turns in the order in which the ranks have begun them.
struct InTurn {
    saves: ProcessGroup,
    turn: Turn,
}

impl Exchange for InTurn {
    fn rank(&self) -> usize {
        self.saves.rank()
    }

    fn exchange(&self, at: &str, mine: std::result::Result<String, String>) -> Result<Vec<String>> {
        self.turn.wait();
        self.saves.exchange(at, mine)
    }

    fn is_known_to_all(&self, error: &Error) -> bool {
        self.saves.is_known_to_all(error)
    }
}

//! Errors of groups of ranks.

use std::fmt;
use std::process::ExitStatus;

/// Why ranks could not form a group, or could not communicate.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum DistributedError {
    /// An environment variable that describes the group is not set, or has a value that cannot be used.
    #[error(
        "{variable} {problem}; spawn and torchrun set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
    )]
    Environment {
        /// The environment variable.
        variable: &'static str,
        /// The problem, and the values that are allowed.
        problem: String,
    },

    /// The store, through which ranks find each other, could not be reached or served.
    #[error("the store at {address} cannot be used: {message}")]
    Store {
        /// The address, as `host:port`.
        address: String,
        /// libtorch's or the system's message.
        message: String,
    },

    /// An operation failed because ranks have ended, have left, have failed, or did not answer before the timeout. The
    /// group can no longer be used on any rank. Form a new one with a new name, and resume from the last checkpoint.
    #[error("{operation} failed on rank {rank} of {size}{}: {message}", Missing(missing))]
    Communication {
        /// The function that was called.
        operation: &'static str,
        /// This rank.
        rank: usize,
        /// The number of ranks.
        size: usize,
        /// The ranks that did not report a failure of their own within five seconds, so that they have probably ended
        /// or hang.
        missing: Vec<usize>,
        /// The message of the rank that has failed first: `rank 1 failed first: ...` if it is another one. It is that
        /// of libtorch, or of an error or a panic in the rank's backward pass.
        message: String,
    },

    /// The ranks called different operations, or passed tensors of different shapes or dtypes. Nothing was
    /// communicated, and the group can still be used.
    #[error("the ranks disagree: {}", Calls(calls))]
    Mismatch {
        /// The calls of the ranks, in the order of the ranks.
        calls: Vec<String>,
    },

    /// The work of a rank, for which the others have waited, failed. The group can still be used.
    #[error("rank {rank} failed: {message}")]
    Rank {
        /// The first rank that failed.
        rank: usize,
        /// The message of its error.
        message: String,
    },

    /// A parameter or a buffer has changed since the model was distributed. Make a new `DistributedDataParallel`, on
    /// all ranks.
    #[error(
        "{name} {change} after the model was distributed: make a new DistributedDataParallel on all ranks"
    )]
    Parameter {
        /// The name of the variable in the `VarStore`; `a variable` for one that was added.
        name: String,
        /// The change.
        change: VariableChange,
    },

    /// A parameter has received several gradients in one backward pass, of which only the first is sure to be averaged.
    /// The gradients of this iteration are unusable: drop them with `zero_grad`.
    #[error(
        "{name} has received several gradients in one backward pass, which cannot all be averaged: run one backward pass of the sum of all losses, and use it in at most one custom function that runs a backward pass of its own"
    )]
    Repeated {
        /// The name of the parameter in the `VarStore`.
        name: String,
    },

    /// The loss does not depend on parameters of the model, so that their gradients cannot be averaged. Freeze or
    /// remove them, or set `find_unused_parameters`. The gradients of this iteration are unusable, and so is the
    /// `DistributedDataParallel`: make a new one, on all ranks.
    #[error(
        "the loss of rank {rank} does not depend on the parameters {names:?}: freeze or remove them, or set find_unused_parameters"
    )]
    Unused {
        /// This rank.
        rank: usize,
        /// The names of the parameters in the `VarStore`.
        names: Vec<String>,
        /// libtorch's message.
        message: String,
    },

    /// The group can no longer be used, because an operation has failed. Form a new one.
    #[error("{operation} was called on a group that has failed: form a new group")]
    Failed {
        /// The function that was called.
        operation: &'static str,
    },

    /// A rank that [`spawn`](crate::distributed::ProcessGroup::spawn) was to start could not be started or waited for.
    /// The others have been ended.
    #[error("rank {rank} could not be started or waited for: {message}")]
    Spawn {
        /// The rank.
        rank: usize,
        /// The system's message.
        message: String,
    },

    /// A rank that [`spawn`](crate::distributed::ProcessGroup::spawn) has started failed before the others, which have
    /// been ended. The rank's own output says why, or `status` has the signal that ended it.
    #[error("rank {rank} of {size} has failed ({status}), and the other ranks have been ended")]
    RankFailed {
        /// The rank.
        rank: usize,
        /// The number of ranks.
        size: usize,
        /// Its exit status, or the signal that has ended it.
        status: ExitStatus,
    },

    /// A signal, such as that of Ctrl-C, has reached the process that waits in
    /// [`spawn`](crate::distributed::ProcessGroup::spawn) for the ranks. It was passed on to them, and all have ended.
    #[error("signal {signal} has interrupted the ranks")]
    Interrupted {
        /// The number of the signal, such as 2 for `SIGINT` and 15 for `SIGTERM`.
        signal: i32,
    },
}

/// How many ranks a message lists.
const MOST_NAMED: usize = 16;

struct Missing<'a>(&'a [usize]);

impl fmt::Display for Missing<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [] => Ok(()),
            [rank] => write!(f, " (rank {rank} does not answer)"),
            ranks if ranks.len() <= MOST_NAMED => write!(f, " (the ranks {ranks:?} do not answer)"),
            ranks => {
                let (named, others) = ranks.split_at(MOST_NAMED);
                write!(f, " (the ranks {named:?} and {} others do not answer)", others.len())
            }
        }
    }
}

struct Calls<'a>(&'a [String]);

impl fmt::Display for Calls<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (rank, call) in self.0.iter().enumerate() {
            let separator = if rank == 0 { "" } else { "; " };
            write!(f, "{separator}rank {rank} calls {call}")?;
        }
        Ok(())
    }
}

/// The change to a parameter or a buffer of a distributed model, in a [`DistributedError::Parameter`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VariableChange {
    /// It was not there when the model was distributed.
    #[error("was added to the VarStore")]
    Added,

    /// It did not require a gradient, and now does.
    #[error("was unfrozen")]
    Unfrozen,

    /// It required a gradient, and no longer does.
    #[error("was frozen")]
    Frozen,

    /// It has another dtype.
    #[error("was cast to another dtype")]
    Cast,

    /// It has another shape.
    #[error("was given another shape")]
    Reshaped,

    /// It is on another device.
    #[error("was moved to another device")]
    Moved,

    /// It is sparse now.
    #[error("was made sparse")]
    MadeSparse,

    /// Its elements share memory, as those of an expanded tensor do, so that none of them can be written.
    #[error("was given memory that its elements share")]
    Expanded,
}

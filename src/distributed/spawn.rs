//! Ranks that the program itself starts, as processes on this machine.

use std::env;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::distributed::processes::Ranks;
use crate::distributed::store::Store;
use crate::error::{Error, Result};
use crate::ffi::processes::Signals;

/// Held while ranks run, because the handling of signals belongs to the whole process.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// How ranks are started and ended.
#[derive(Clone, Debug)]
pub struct SpawnConfig {
    /// How long ranks that are asked to end may take before they are killed; 30 seconds by default, as with torchrun.
    pub grace_period: Duration,
}

impl Default for SpawnConfig {
    fn default() -> Self {
        Self { grace_period: Duration::from_secs(30) }
    }
}

/// The process in which [`spawn`] has returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the process that started the ranks must not go on as one of them"]
pub enum Spawned {
    /// A rank, which goes on to call [`ProcessGroup::from_env`](crate::distributed::ProcessGroup::from_env).
    Rank,
    /// The process that started the ranks. All of them have ended successfully.
    Finished,
}

/// Starts ranks with the default options: see [`SpawnConfig::spawn`].
///
/// # Errors
///
/// As for [`SpawnConfig::spawn`].
pub fn spawn(ranks: usize) -> Result<Spawned> {
    SpawnConfig::default().spawn(ranks)
}

impl SpawnConfig {
    /// Starts this program `ranks` times, as the ranks of a group on this machine, and waits until all of them have
    /// ended. Call it before anything is loaded: each rank runs the program from its beginning, with the same
    /// arguments, and in a rank this returns [`Spawned::Rank`] at once. Corresponds to `torch.multiprocessing.spawn`,
    /// and to torchrun on one machine.
    ///
    /// A process is a rank if `RANK` is set, so under torchrun, which sets it, nothing is started. The ranks have the
    /// variables `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT` and
    /// `TORCHELASTIC_RUN_ID`, which names this job. If there are several, they also have `OMP_NUM_THREADS=1`, unless it
    /// is set already. This process serves their store on 127.0.0.1. Their standard input is empty.
    ///
    /// If a rank fails, the others receive SIGTERM, and those that are left after the
    /// [`grace_period`](Self::grace_period) are killed. SIGINT, SIGTERM, SIGHUP and SIGQUIT are passed on to the ranks,
    /// unless this process ignores them, and ranks that are left after the same time are killed. Each rank is in a
    /// process group of its own, so Ctrl-C reaches it once. On Linux the ranks are killed if this process, or the
    /// thread that called this, ends before them. On other systems they survive if this process is killed.
    ///
    /// Only one call runs at a time: other threads that call this wait until it has returned.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if `ranks` is 0. In the process that starts the ranks also:
    /// [`DistributedError::Store`] if the store cannot be served;
    /// [`DistributedError::Spawn`] if a rank cannot be started;
    /// [`DistributedError::RankFailed`] if a rank is ended by a signal, or has an exit status other than 0;
    /// [`DistributedError::Interrupted`] if a signal was passed on.
    ///
    /// [`DistributedError::Store`]: crate::distributed::DistributedError::Store
    /// [`DistributedError::Spawn`]: crate::distributed::DistributedError::Spawn
    /// [`DistributedError::RankFailed`]: crate::distributed::DistributedError::RankFailed
    /// [`DistributedError::Interrupted`]: crate::distributed::DistributedError::Interrupted
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use tch_amp::distributed::{self, ProcessGroup, Spawned};
    ///
    /// fn main() -> tch_amp::Result<()> {
    ///     if distributed::spawn(2)? == Spawned::Finished {
    ///         return Ok(());
    ///     }
    ///     let group = ProcessGroup::from_env()?;
    ///     println!("rank {} of {}", group.rank(), group.size());
    ///     Ok(())
    /// }
    /// ```
    pub fn spawn(&self, ranks: usize) -> Result<Spawned> {
        if ranks == 0 {
            let problem = "is 0, but at least one rank is needed".to_owned();
            return Err(Error::InvalidArgument { name: "ranks", problem });
        }
        if env::var_os("RANK").is_some() {
            return Ok(Spawned::Rank);
        }
        let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let store = Store::serve_locally()?;
        let signals = Signals::catch()?;
        Ranks::start(ranks, store.port().unwrap_or_default())?.wait(&signals, self.grace_period)?;
        Ok(Spawned::Finished)
    }
}

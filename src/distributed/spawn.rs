//! Ranks that the program itself starts, as processes on this machine.

use std::env;
use std::sync::{Mutex, PoisonError};

use crate::distributed::group::{GroupConfig, ProcessGroup};
use crate::distributed::processes::Ranks;
use crate::distributed::store::Store;
use crate::error::{Error, Result};
use crate::ffi::processes::Signals;

/// Held while ranks run, because the handling of signals belongs to the whole process.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

impl ProcessGroup {
    /// Starts this program several times, as the ranks of a group, with the default options: see [`GroupConfig::spawn`].
    ///
    /// # Errors
    ///
    /// As for [`GroupConfig::spawn`].
    pub fn spawn(ranks: usize) -> Result<Option<Self>> {
        GroupConfig::default().spawn(ranks)
    }
}

impl GroupConfig {
    /// Starts this program `ranks` times, as the ranks of a group on this machine. In each rank this returns the group
    /// as soon as all of them have called it; in the process that has started them it returns `None` once all of them
    /// have ended. Call it before anything is loaded: each rank runs the program from its beginning, with the same
    /// arguments. Corresponds to `torch.multiprocessing.spawn`, and to torchrun on one machine.
    ///
    /// A process is a rank if `RANK` is set, so under torchrun, which sets it, nothing is started, and this is
    /// [`from_env`](Self::from_env). The ranks have the variables `RANK`, `LOCAL_RANK`, `WORLD_SIZE`,
    /// `LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT` and `TORCHELASTIC_RUN_ID`, which names this job. If there are
    /// several, they also have `OMP_NUM_THREADS=1`, unless it is set already. This process serves their store on
    /// 127.0.0.1. Their standard input is empty.
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
    /// [`Error::InvalidArgument`] if `ranks` is 0. In a rank, as for [`from_env`](Self::from_env). In the process that
    /// starts the ranks:
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
    /// use tch_amp::distributed::ProcessGroup;
    ///
    /// fn main() -> tch_amp::Result<()> {
    ///     let Some(group) = ProcessGroup::spawn(2)? else {
    ///         return Ok(());
    ///     };
    ///     println!("rank {} of {}", group.rank(), group.size());
    ///     Ok(())
    /// }
    /// ```
    pub fn spawn(&self, ranks: usize) -> Result<Option<ProcessGroup>> {
        if ranks == 0 {
            let problem = "is 0, but at least one rank is needed".to_owned();
            return Err(Error::InvalidArgument { name: "ranks", problem });
        }
        if env::var_os("RANK").is_some() {
            return self.from_env().map(Some);
        }
        let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let store = Store::serve_locally()?;
        let signals = Signals::catch()?;
        Ranks::start(ranks, store.port().unwrap_or_default())?.wait(&signals, self.grace_period)?;
        Ok(None)
    }
}

//! Ranks that are processes of this machine, which the program starts itself.

use std::env;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::builder::builder;
use crate::distributed::processes::Ranks;
use crate::distributed::store::Store;
use crate::error::{Error, Result};
use crate::ffi::processes::Signals;

/// Held while ranks run, because the handling of signals belongs to the whole process.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// How ranks are started and ended.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SpawnOptions {
    /// How long ranks that are asked to end may take before they are killed; 30 seconds by default, as with torchrun.
    pub grace_period: Duration,
}

builder!(SpawnOptions { grace_period: Duration });

impl Default for SpawnOptions {
    fn default() -> Self {
        Self { grace_period: Duration::from_secs(30) }
    }
}

/// Which process a call of [`spawn`] has returned in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the process that has started the ranks must not go on as one of them"]
pub enum Spawned {
    /// In a rank, at once. It goes on to [`ProcessGroup::from_env`](crate::distributed::ProcessGroup::from_env).
    Rank,
    /// In the process that has started the ranks, after all of them have ended successfully.
    Finished,
}

/// Starts ranks with the default options: see [`SpawnOptions::spawn`].
///
/// # Errors
///
/// As for [`SpawnOptions::spawn`].
pub fn spawn(ranks: usize) -> Result<Spawned> {
    SpawnOptions::default().spawn(ranks)
}

impl SpawnOptions {
    /// Starts this program `ranks` times, as the ranks of a group on this machine, and waits for them. Call it first,
    /// before anything is loaded: each rank runs the program from its beginning, with the same arguments, and in a rank
    /// this returns [`Spawned::Rank`] at once. Corresponds to `torch.multiprocessing.spawn`, and to torchrun on one
    /// machine.
    ///
    /// A process is a rank if `RANK` is set, so that under torchrun, which sets it, nothing is started. The ranks have
    /// the variables `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`, and
    /// `OMP_NUM_THREADS=1` if it is not set and there are several. This process serves their store on 127.0.0.1. Their
    /// standard input is empty.
    ///
    /// If a rank fails, the others are asked to end with SIGTERM, and are killed after the
    /// [`grace_period`](Self::grace_period). SIGINT, SIGTERM, SIGHUP and SIGQUIT, unless this process ignores them, are
    /// passed on to the ranks, which are killed after the same time. Each rank is in a process group of its own, so
    /// that Ctrl-C reaches it once. When this returns, all have ended. On Linux they are killed if this process ends in
    /// any way, or the thread that called this; on other systems ranks survive a process that is killed.
    ///
    /// Other threads that call this wait until the ranks of the first one have ended.
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
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if `ranks` is 0. Only in the process that starts the ranks, and of
    /// [`DistributedError`](crate::distributed::DistributedError): `Store` if the store cannot be served; `Spawn` if a
    /// rank cannot be started; `RankFailed` if a rank ends by a signal, or with another exit status than 0;
    /// `Interrupted` if a signal was passed on.
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

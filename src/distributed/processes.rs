//! The processes of ranks: they are started, watched and ended together.

use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{env, io, thread};

use crate::distributed::group::{GroupConfig, ProcessGroup};
use crate::distributed::rendezvous::new_job;
use crate::distributed::store::Store;
use crate::error::{DistributedError, Error, Result};
use crate::ffi::processes::{SIGKILL, SIGTERM, Signals, end_with_this_thread, signal};

/// How often the ranks are looked at.
const INTERVAL: Duration = Duration::from_millis(20);

/// The ranks, by their numbers; `None` for one that has ended and was waited for.
pub(super) struct Ranks(Vec<Option<Child>>);

impl Ranks {
    pub(super) fn start(size: usize, port: u16) -> Result<Self> {
        let mut ranks = Self(Vec::with_capacity(size));
        let job = new_job();
        for rank in 0..size {
            let child = command(rank, size, port, &job).and_then(|mut command| command.spawn());
            ranks.0.push(Some(child.map_err(|error| unstarted(rank, &error))?));
        }
        Ok(ranks)
    }

    /// Waits until all have ended. After the first failure or signal, they have the grace period to end.
    pub(super) fn wait(mut self, signals: &Signals, grace_period: Duration) -> Result<()> {
        let mut ending: Option<(Error, Instant)> = None;
        loop {
            if let Err(error) = self.look()
                && ending.is_none()
            {
                self.signal(SIGTERM);
                ending = Some((error, Instant::now()));
            }
            if let Some(signal) = signals.caught() {
                self.signal(signal);
                let error = DistributedError::Interrupted { signal }.into();
                ending.get_or_insert((error, Instant::now()));
            }
            if self.running().next().is_none() {
                return ending.map_or(Ok(()), |(error, _)| Err(error));
            }
            if ending.as_ref().is_some_and(|(_, since)| since.elapsed() >= grace_period) {
                self.signal(SIGKILL);
            }
            thread::sleep(INTERVAL);
        }
    }

    fn running(&self) -> impl Iterator<Item = &Child> {
        self.0.iter().flatten()
    }

    /// Forgets the ranks that have ended, and returns the failure of one. If several have failed since the last time, a
    /// signal is more likely to be the cause than an exit status, with which ranks answer the end of another one.
    fn look(&mut self) -> Result<()> {
        let size = self.0.len();
        let mut failed: Option<(usize, ExitStatus)> = None;
        for (rank, child) in self.0.iter_mut().enumerate() {
            let Some(running) = child else { continue };
            let ended = running.try_wait().map_err(|error| {
                *child = None;
                unstarted(rank, &error)
            })?;
            let Some(status) = ended else { continue };
            *child = None;
            let is_signal = |status: ExitStatus| status.code().is_none();
            let is_cause = failed.is_none_or(|(_, first)| is_signal(status) && !is_signal(first));
            if !status.success() && is_cause {
                failed = Some((rank, status));
            }
        }
        let failure = |(rank, status)| DistributedError::RankFailed { rank, size, status }.into();
        failed.map_or(Ok(()), |failed| Err(failure(failed)))
    }

    /// A rank that cannot be reached has ended, which the next look shows.
    fn signal(&self, number: i32) {
        for child in self.running() {
            drop(signal(child, number));
        }
    }
}

impl Drop for Ranks {
    /// Leaves no process behind, after an error or a panic either.
    fn drop(&mut self) {
        self.signal(SIGKILL);
        for child in self.0.iter_mut().flatten() {
            drop(child.wait());
        }
    }
}

/// This program again, as a rank.
fn command(rank: usize, size: usize, port: u16, job: &(&str, String)) -> io::Result<Command> {
    let mut arguments = env::args_os();
    let mut command = Command::new(env::current_exe()?);
    if let Some(name) = arguments.next() {
        command.arg0(name);
    }
    let numbers = [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", size)];
    let numbers = numbers.into_iter().chain([("LOCAL_WORLD_SIZE", size)]);
    command.args(arguments).stdin(Stdio::null()).process_group(0);
    command.envs(numbers.map(|(name, number)| (name, number.to_string())));
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    command.env(job.0, &job.1);
    // This process is what torchrun calls the agent.
    command.env("TORCHELASTIC_USE_AGENT_STORE", "True").env("TORCHELASTIC_RESTART_COUNT", "0");
    if size > 1 && env::var_os("OMP_NUM_THREADS").is_none() {
        // Otherwise each rank would have as many threads as there are cores.
        command.env("OMP_NUM_THREADS", "1");
    }
    end_with_this_thread(&mut command);
    Ok(command)
}

fn unstarted(rank: usize, error: &io::Error) -> Error {
    DistributedError::Spawn { rank, message: error.to_string() }.into()
}

/// Held while ranks run, because the handling of signals belongs to the whole process.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

impl ProcessGroup {
    /// Starts this program several times, as the ranks of a group, with the default options: see
    /// [`GroupConfig::spawn`].
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

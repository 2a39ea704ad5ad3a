//! Groups of ranks.

use std::fmt::Display;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tch::{Cuda, Device};
use xxhash_rust::xxh3::xxh3_64;

use crate::capture;
use crate::distributed::environment::{self, MOST_RANKS, optional};
use crate::distributed::rendezvous::job;
use crate::distributed::rendezvous::{Membership, UNKNOWN};
use crate::distributed::store::{GRACE, within};
use crate::distributed::store::{Store, is_loopback};
use crate::distributed::turns::Turns;
use crate::error::{DistributedError, Error, Result};
use crate::ffi::distributed as ffi;
use crate::ffi::distributed::Gathering;

/// How long a rank waits for another one, as with Gloo in PyTorch.
const TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// How long ranks may take to end, as with torchrun.
const GRACE_PERIOD: Duration = Duration::from_secs(30);

/// How a group is formed.
#[derive(Clone, Debug)]
pub struct GroupConfig {
    /// How long an operation waits for the other ranks before it fails; 30 minutes by default, as in PyTorch.
    pub timeout: Duration,
    /// The network interface to communicate through, such as `eth0`. By default it is the loopback interface if only
    /// this machine can reach the store. Otherwise it is the first one of `GLOO_SOCKET_IFNAME`, or that of the host's
    /// name.
    pub interface: Option<String>,
    /// The name of the group, which has to be the same on all ranks and not yet used with this store, not even by a
    /// group that could not be formed. By default groups are numbered, and the ranks have to form them in the same
    /// order.
    pub name: Option<String>,
    /// How long ranks that [`spawn`](Self::spawn) asks to end may take before it kills them; 30 seconds by default, as
    /// with torchrun.
    pub grace_period: Duration,
}

impl Default for GroupConfig {
    fn default() -> Self {
        Self { timeout: TIMEOUT, interface: None, name: None, grace_period: GRACE_PERIOD }
    }
}

impl GroupConfig {
    /// Forms a group of `size` ranks, which all call this with the same store and options. Blocks until all have.
    /// Corresponds to `torch.distributed.init_process_group`.
    ///
    /// Ranks that do not belong together get an error instead of waiting for each other: ranks with another `size`, two
    /// processes with the same `rank`, and ranks of different jobs, by `TORCHELASTIC_RUN_ID`, which
    /// [`spawn`](Self::spawn) and torchrun set, or else by `SLURM_JOB_ID`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if `size` is more than 65536, if `rank` is not less than `size` or has come already,
    /// if rank 0 has another `size`, if the interface cannot be used, and if the name was used before with this store;
    /// [`DistributedError::Store`] if rank 0 belongs to another job;
    /// [`DistributedError::Communication`] if a rank does not join before the timeout, or is refused;
    /// [`DistributedError::Environment`] if a variable is not UTF-8.
    pub fn join(&self, store: &Store, rank: usize, size: usize) -> Result<ProcessGroup> {
        let invalid = |name, problem| Err(Error::InvalidArgument { name, problem });
        if size > MOST_RANKS {
            return invalid("size", format!("is {size}, but must be at most {MOST_RANKS}"));
        }
        if rank >= size {
            let problem = format!("is {rank}, but must be less than the number of ranks, {size}");
            return invalid("rank", problem);
        }
        if let Some(name) = self.name.as_ref().filter(|name| name.contains('\0')) {
            return invalid("name", format!("is {name:?}, but must have no NUL character"));
        }
        self.form(self.membership_in(store, rank, size))
    }

    /// Forms the group that the environment variables `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` describe.
    /// [`spawn`](Self::spawn) and `torchrun --no-python` set them. Blocks until all ranks have called
    /// this. Corresponds to `init_process_group(init_method="env://")`.
    ///
    /// Rank 0 serves the store, unless `TORCHELASTIC_USE_AGENT_STORE` is `True`: then the process that started the
    /// ranks does. Rank 0 listens on 127.0.0.1 if `MASTER_ADDR` is `localhost` or `127.0.0.1`, and on all interfaces
    /// otherwise. Call this once for each process; form further groups through [`ProcessGroup::store`].
    ///
    /// # Errors
    ///
    /// [`DistributedError::Environment`] if a variable is not set, or is invalid. If `RANK` is set, the other
    /// ranks are told first: rank 0 serves the store to them for five seconds, and another rank takes up to 15 seconds.
    ///
    /// [`DistributedError::Store`] if the store cannot be reached, belongs to another job, or cannot be served because
    /// its port is in use; and as for [`join`](Self::join).
    pub fn from_env(&self) -> Result<ProcessGroup> {
        let (host, port) =
            (environment::variable("MASTER_ADDR")?, environment::parsed("MASTER_PORT")?);
        if host.is_empty() {
            return Err(environment::invalid("MASTER_ADDR", "is empty".to_owned()));
        }
        if port == 0 {
            let problem = "is 0, but must be a port that all ranks know, from 1 to 65535";
            return Err(environment::invalid("MASTER_PORT", problem.to_owned()));
        }
        let (agent, known) = match environment::attempt_of_agent() {
            Ok(attempt) => (attempt, environment::rank_and_size()),
            Err(error) => (None, Err(error)),
        };
        let open = |rank, timeout| {
            let store = match (rank == 0 && agent.is_none(), is_loopback(&host)) {
                (false, _) => Store::connect_within(&host, port, timeout),
                (true, true) => Store::serve_on_loopback(port),
                (true, false) => Store::serve(port),
            };
            // torchrun's store remembers the keys of the attempts before a restart.
            store.map(|store| match &agent {
                Some(attempt) => store.of_attempt(attempt),
                None => store.of_rank(0),
            })
        };
        let (rank, size) = match known {
            Ok(known) => known,
            // This is no rank of a group, but a program that was started by hand.
            Err(error) if std::env::var_os("RANK").is_none() => return Err(error),
            Err(error) => {
                // Otherwise the other ranks would wait for this one.
                let rank = match &error {
                    Error::Distributed(DistributedError::Environment {
                        variable: "RANK", ..
                    }) => UNKNOWN,
                    _ => environment::parsed("RANK").unwrap_or(UNKNOWN),
                };
                return Err(match open(rank, GRACE) {
                    Ok(store) => self.membership_in(&store, rank, MOST_RANKS).refuse(error),
                    Err(_) => error,
                });
            }
        };
        self.join(&open(rank, self.timeout)?, rank, size)
    }

    /// The membership of a rank in a new group.
    pub(super) fn membership_in(&self, store: &Store, rank: usize, size: usize) -> Membership {
        let (name, prefix) = (self.name.clone(), store.prefix(self.name.as_deref(), rank));
        Membership { store: store.clone(), prefix, name, rank, size }
    }

    /// Forms the group of which a rank is a member.
    fn form(&self, membership: Membership) -> Result<ProcessGroup> {
        let prepared = self.interface_for(&membership.store).and_then(|name| Ok((name, job()?)));
        let (interface, job) = prepared.map_err(|error| membership.refuse(error))?;
        let (here, timeout, cuda) = (membership.clone(), self.timeout, Cuda::is_available());
        let form = move || {
            here.meet(&job, timeout)?;
            let member = ffi::Member {
                prefix: &here.prefix,
                interface: interface.as_deref(),
                host: host(&here.store),
                rank: here.rank,
                size: here.size,
                timeout,
                cuda,
            };
            let group = ffi::Group::new(here.store.handle(), &member)?;
            // A rank that left at once would end connections that the others are still making.
            group.gather(&[0], here.size)?.finish()?;
            Ok(group)
        };
        let handle = within(timeout.saturating_add(GRACE), form).map_err(|error| match error {
            Error::Torch(message) => membership.failure("forming the group", message, || ()),
            other => other,
        })?;
        static FORMED: AtomicU64 = AtomicU64::new(0);
        Ok(ProcessGroup(Arc::new(Shared {
            number: FORMED.fetch_add(1, Ordering::Relaxed),
            handle: Mutex::new(Some(Arc::new(handle))),
            membership,
            options: self.clone(),
            cuda,
            order: Mutex::default(),
            begun: AtomicUsize::new(0),
            models: AtomicUsize::new(0),
            saves: Mutex::default(),
            turns: Arc::default(),
            living: AtomicUsize::new(0),
        })))
    }

    /// The network interface of the connections, or `None` for the one of the host's name.
    fn interface_for(&self, store: &Store) -> Result<Option<String>> {
        let names = match &self.interface {
            None if !store.is_local() => optional("GLOO_SOCKET_IFNAME")?.unwrap_or_default(),
            name => name.clone().unwrap_or_default(),
        };
        let name = names.split(',').next().filter(|name| !name.is_empty()).map(str::to_owned);
        ffi::check_interface(name.as_deref(), host(store)).map_err(|error| {
            let what = name
                .as_ref()
                .map_or("that of the host's name".to_owned(), |name| format!("{name:?}"));
            let problem = format!("is {what}, which cannot be used: {error}");
            Error::InvalidArgument { name: "interface", problem }
        })?;
        Ok(name)
    }
}

/// The address of the connections, or `None` for that of this host's name.
fn host(store: &Store) -> Option<&'static str> {
    store.is_local().then_some("127.0.0.1")
}

/// Ranks that communicate by collectives. Clones are the same group. Corresponds to `torch.distributed.ProcessGroup`,
/// with the backend Gloo for CPU tensors and, where the process has a GPU, NCCL for CUDA tensors.
///
/// Each rank with CUDA tensors needs a GPU of its own. After the comparison of the calls, a collective of CUDA tensors
/// makes the current stream wait, not the host. If a rank does not answer before the timeout, PyTorch's NCCL backend
/// ends the process by default: see `TORCH_NCCL_ASYNC_ERROR_HANDLING` in PyTorch's documentation. Two ranks have
/// trained over NCCL on one GPU; failures of a rank have been tried with Gloo and on simulated GPUs.
///
/// Every rank calls the same operations in the same order. What each rank calls is compared before anything else is
/// communicated, so that a mistake is an error on every rank; only [`monitored_barrier`](Self::monitored_barrier) is
/// not compared. If a rank ends or hangs, the others get an error within the timeout, and the group can no longer be
/// used.
///
/// Threads may share a group: their collectives run one after the other. All ranks have to call them in the same order.
///
/// ```
/// use tch::{Kind, Tensor};
/// use tch_amp::distributed::{ProcessGroup, ReduceOp, Store};
///
/// // Two ranks in one process; ranks in processes of their own call ProcessGroup::from_env().
/// let store = Store::in_process()?;
/// std::thread::scope(|scope| {
///     for rank in 0..2 {
///         let store = &store;
///         scope.spawn(move || {
///             let group = ProcessGroup::new(store, rank, 2).unwrap();
///             let mut loss = Tensor::from(rank as f32);
///             group.all_reduce(&mut loss, ReduceOp::Mean).unwrap();
///             assert_eq!(loss.double_value(&[]), 0.5);
///         });
///     }
/// });
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ProcessGroup(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// How many groups this process has formed before.
    number: u64,
    /// `None` after a failure: the connections are closed, so that the ranks on the other side fail, too.
    handle: Mutex<Option<Arc<ffi::Group>>>,
    membership: Membership,
    options: GroupConfig,
    /// Whether CUDA tensors can be communicated.
    cuda: bool,
    /// Held while a collective runs.
    order: Mutex<()>,
    /// How many collectives have begun on this rank.
    begun: AtomicUsize,
    /// The number of models that were distributed over the group, which is the same on all ranks.
    models: AtomicUsize,
    /// How many of them are alive on this rank.
    living: AtomicUsize,
    /// The group of the saves in the background, since the first one.
    saves: Mutex<Option<ProcessGroup>>,
    /// Those of threads that communicate several times each.
    turns: Arc<Turns>,
}

/// A distributed model that is alive.
#[derive(Debug)]
pub(super) struct LivingModel(ProcessGroup);

impl Drop for LivingModel {
    fn drop(&mut self) {
        self.0.0.living.fetch_sub(1, Ordering::Relaxed);
    }
}

impl ProcessGroup {
    /// Forms a group with the default options: see [`GroupConfig::join`].
    ///
    /// # Errors
    ///
    /// As for [`GroupConfig::join`].
    pub fn new(store: &Store, rank: usize, size: usize) -> Result<Self> {
        GroupConfig::default().join(store, rank, size)
    }

    /// Forms the group that the environment describes, with the default options: see [`GroupConfig::from_env`].
    ///
    /// # Errors
    ///
    /// As for [`GroupConfig::from_env`].
    pub fn from_env() -> Result<Self> {
        GroupConfig::default().from_env()
    }

    /// Returns the number of this rank, starting at 0.
    pub fn rank(&self) -> usize {
        self.0.membership.rank
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.0.membership.size
    }

    /// Returns what no other group of this process has.
    pub(super) fn number(&self) -> u64 {
        self.0.number
    }

    /// Returns how long an operation waits for the other ranks.
    pub fn timeout(&self) -> Duration {
        self.0.options.timeout
    }

    /// Returns the store through which the ranks have found each other, to form another group of them.
    pub fn store(&self) -> &Store {
        &self.0.membership.store
    }

    /// Returns the reason why the group cannot communicate tensors on a device, if there is one.
    pub(super) fn problem_of(&self, device: Device) -> Option<String> {
        match device {
            Device::Cpu => None,
            Device::Cuda(_) if self.0.cuda => None,
            Device::Cuda(_) => {
                Some(format!("is on {device:?}, but the group was formed without a GPU"))
            }
            _ => Some(format!("is on {device:?}, but groups communicate CPU and CUDA tensors")),
        }
    }

    /// Begins a collective, which ends with the guard.
    pub(super) fn begin(&self) -> MutexGuard<'_, ()> {
        let order = self.0.order.lock().unwrap_or_else(PoisonError::into_inner);
        self.0.begun.fetch_add(1, Ordering::Relaxed);
        order
    }

    /// Returns the number of collectives that have begun.
    pub(super) fn begun(&self) -> usize {
        self.0.begun.load(Ordering::Relaxed)
    }

    /// Counts a distributed model as alive until the guard goes.
    pub(super) fn living_model(&self) -> LivingModel {
        self.0.living.fetch_add(1, Ordering::Relaxed);
        LivingModel(self.clone())
    }

    /// Returns the number of distributed models that are alive on this rank.
    pub(super) fn living_models(&self) -> usize {
        self.0.living.load(Ordering::Relaxed)
    }

    /// Returns the number of a new model that is distributed over the group, and a group of the same ranks that only
    /// this model uses: its backward passes communicate from threads of libtorch.
    pub(super) fn for_model(&self) -> Result<(usize, Self)> {
        let number = self.0.models.fetch_add(1, Ordering::Relaxed);
        Ok((number, self.same_ranks(&format!("model {number}"))?))
    }

    /// Returns a group of the same ranks that only saves in the background use. All ranks call this.
    pub(super) fn saves(&self) -> Result<Self> {
        let mut saves = self.0.saves.lock().unwrap_or_else(PoisonError::into_inner);
        let formed = match saves.take() {
            Some(formed) => formed,
            None => self.same_ranks("saves")?,
        };
        Ok(saves.insert(formed).clone())
    }

    /// Returns the turns of threads that communicate several times each.
    pub(super) fn turns(&self) -> &Arc<Turns> {
        &self.0.turns
    }

    /// Forms another group of the same ranks, for what all of them know by a name.
    fn same_ranks(&self, what: &str) -> Result<Self> {
        let membership = self.0.membership.clone();
        let prefix = format!("{what} of {}", membership.prefix);
        self.0.options.form(Membership { prefix, ..membership })
    }

    /// Returns whether an operation has failed.
    pub(super) fn is_closed(&self) -> bool {
        self.0.handle.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Runs the part of a collective that follows the comparison. If it fails, the other ranks may wait for this one,
    /// which tells them why.
    pub(super) fn complete<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        work().inspect_err(|error| {
            if !self.is_closed() {
                self.report(error);
                self.close();
                self.await_reports();
            }
        })
    }

    /// Reports why this rank is about to close the group: the operations of the other ranks fail with this cause.
    pub(super) fn report(&self, cause: &dyn Display) {
        self.0.membership.report(&cause.to_string());
    }

    /// Waits until the other ranks have noticed that the group is closed, for at most a few seconds.
    pub(super) fn await_reports(&self) {
        self.0.membership.await_reports();
    }

    /// Closes the connections, whatever else uses them: operations that have begun would keep them open until their
    /// timeout. The group cannot be used any more.
    pub(super) fn close(&self) {
        let handle = self.0.handle.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(handle) = handle {
            handle.close();
        }
    }

    /// Runs an operation that communicates. After one has failed, the group cannot be used any more.
    pub(super) fn run<T>(
        &self,
        operation: &'static str,
        call: impl FnOnce(&ffi::Group) -> Result<T>,
    ) -> Result<T> {
        let handle = self.handle(operation)?;
        let result = call(&handle);
        drop(handle);
        result.map_err(|error| self.failure(operation, error))
    }

    /// Returns the connections, or an error if an operation has failed before.
    pub(super) fn handle(&self, operation: &'static str) -> Result<Arc<ffi::Group>> {
        capture::refuse(operation, "graphs are of one device; train several without a graph")?;
        let handle = self.0.handle.lock().unwrap_or_else(PoisonError::into_inner).clone();
        handle.ok_or_else(|| DistributedError::Failed { operation }.into())
    }

    /// The error of an operation that communicates. The group cannot be used any more.
    pub(super) fn failure(&self, operation: &'static str, error: Error) -> Error {
        match error {
            Error::Torch(message) => self.0.membership.failure(operation, message, || self.close()),
            other => other,
        }
    }
}

/// The size of the record of a call, which is the same for all calls.
const RECORD: usize = 256;
const HASH: usize = 8;
/// The place of the flag, behind the text.
const FLAG: usize = RECORD - 1;

/// A comparison of calls that has begun.
#[derive(Debug)]
pub(super) struct Comparison {
    operation: &'static str,
    mine: [u8; RECORD],
    /// The records of all ranks.
    pub(super) records: Gathering,
}

impl ProcessGroup {
    /// Returns an error unless all ranks call the same. Compared before anything else is communicated, because gloo
    /// aborts the process if the ranks communicate different amounts.
    pub(super) fn compare(&self, operation: &'static str, call: &str) -> Result<()> {
        self.compare_with(operation, call, false).map(drop)
    }

    /// Returns an error unless all ranks call the same, for a call that communicates nothing else.
    pub(crate) fn compare_call(&self, operation: &'static str, call: &str) -> Result<()> {
        let _order = self.begin();
        self.compare(operation, call)
    }

    /// Returns whether any rank raises the flag, or an error unless all ranks call the same.
    pub(super) fn compare_with(
        &self,
        operation: &'static str,
        call: &str,
        flag: bool,
    ) -> Result<bool> {
        self.finish_comparison(&self.begin_comparison(operation, call, flag)?)
    }

    /// Begins to compare what the ranks call, and does not block. As with all collectives, all ranks begin them in the
    /// same order.
    pub(super) fn begin_comparison(
        &self,
        operation: &'static str,
        call: &str,
        flag: bool,
    ) -> Result<Comparison> {
        let mine = record(call, flag);
        let records = self.run(operation, |group| group.gather(&mine, self.size()))?;
        Ok(Comparison { operation, mine, records })
    }

    /// Blocks until all ranks have called something. Then returns whether any of them raises the flag, or an error
    /// unless all call the same.
    pub(super) fn finish_comparison(&self, comparison: &Comparison) -> Result<bool> {
        let Comparison { operation, mine, records } = comparison;
        let all = records.finish().map_err(|error| self.failure(operation, error))?;
        let records: Vec<_> = all.chunks_exact(RECORD).collect();
        if records.iter().all(|record| record[..FLAG] == mine[..FLAG]) {
            return Ok(records.iter().any(|record| record[FLAG] != 0));
        }
        let calls = records.into_iter().map(text).collect();
        Err(DistributedError::Mismatch { calls }.into())
    }

    /// Returns the checked arguments of a call that all ranks make. If this rank has refused its own, the others, which
    /// would wait for it, get an error that says why.
    pub(super) fn compare_checked<T>(
        &self,
        operation: &'static str,
        checked: Result<T>,
        call: impl FnOnce(&T) -> String,
    ) -> Result<T> {
        match checked {
            Ok(arguments) => {
                self.compare(operation, &call(&arguments))?;
                Ok(arguments)
            }
            Err(refused) => Err(self.refuse(operation, refused)),
        }
    }

    /// Tells the other ranks that a call of this one has failed before it communicated, and returns the error.
    pub(super) fn refuse(&self, operation: &'static str, error: Error) -> Error {
        // The caller has to know of this error, whatever the other ranks do.
        let _mismatch =
            self.compare(operation, &format!("{operation}, which fails there: {error}"));
        error
    }
}

/// The hash of a text, which counts where the text is too long for the record, as much of it as fits, and the flag.
fn record(call: &str, flag: bool) -> [u8; RECORD] {
    let mut record = [0; RECORD];
    record[..HASH].copy_from_slice(&xxh3_64(call.as_bytes()).to_le_bytes());
    for (to, from) in record[HASH..FLAG].iter_mut().zip(call.as_bytes()) {
        *to = *from;
    }
    record[FLAG] = flag.into();
    record
}

fn text(record: &[u8]) -> String {
    let text = String::from_utf8_lossy(&record[HASH..FLAG]);
    text.trim_end_matches(['\0', char::REPLACEMENT_CHARACTER]).to_owned()
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_of_long_texts_differ_after_their_end() {
        let (one, other) = (format!("{}1", "é".repeat(300)), format!("{}2", "é".repeat(300)));
        assert_ne!(record(&one, false), record(&other, false));
        assert_eq!(text(&record(&one, true)), "é".repeat((FLAG - HASH) / 2));
        assert_eq!(text(&record("all_reduce", true)), "all_reduce");
    }
}

//! Groups of ranks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::builder::builder;
use crate::distributed::store::Store;
use crate::error::{DistributedError, Error, Result};
use crate::ffi::distributed as ffi;

/// How long a rank waits for another one, as with Gloo in PyTorch.
const TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// How long a rank waits after a failure for the others to report it, too.
const GRACE: Duration = Duration::from_secs(2);

/// How a group is formed.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GroupOptions {
    /// How long an operation waits for the other ranks before it fails; 30 minutes by default, as in PyTorch.
    pub timeout: Duration,
    /// The network interface to communicate through, such as `eth0`. By default it is that of `GLOO_SOCKET_IFNAME`, or
    /// the loopback interface if the store is only reachable from this machine, or else that of the host's name.
    pub interface: Option<String>,
    /// The name of the group, which has to be the same on all ranks and not yet used with this store. By default groups
    /// are numbered, so that the ranks have to form them in the same order.
    pub name: Option<String>,
}

builder!(GroupOptions { timeout: Duration, interface: Option<String>, name: Option<String> });

impl Default for GroupOptions {
    fn default() -> Self {
        Self { timeout: TIMEOUT, interface: None, name: None }
    }
}

impl GroupOptions {
    /// Forms a group of `size` ranks, which all call this with the same store and options. Blocks until all have.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if `rank` is not less than `size`;
    /// [`DistributedError::Communication`] if a rank does not come before the timeout.
    pub fn join(&self, store: &Store, rank: usize, size: usize) -> Result<ProcessGroup> {
        if rank >= size || i32::try_from(size).is_err() {
            let problem = format!("is {rank}, but must be less than the number of ranks, {size}");
            return Err(Error::InvalidArgument { name: "rank", problem });
        }
        let prefix = self.name.clone().unwrap_or_else(|| store.next_name(rank));
        let from_env = std::env::var("GLOO_SOCKET_IFNAME").ok().filter(|name| !name.is_empty());
        let interface = self.interface.clone().or(from_env);
        let member = ffi::Member {
            prefix: &prefix,
            interface: interface.as_deref(),
            host: store.is_local().then_some("127.0.0.1"),
            rank,
            size,
            timeout: self.timeout,
        };
        let place = Place { store: store.clone(), prefix: prefix.clone(), rank, size };
        let handle = ffi::Group::new(store.handle(), &member)
            .map_err(|error| place.failure("forming the group", &error))?;
        let timeout = self.timeout;
        Ok(ProcessGroup(Arc::new(Shared {
            handle,
            place,
            timeout,
            failed: AtomicBool::new(false),
        })))
    }
}

/// Ranks that communicate by collectives. Clones are the same group. Corresponds to `torch.distributed.ProcessGroup`,
/// with the backend Gloo.
///
/// Every rank calls the same operations in the same order. What the ranks call is compared before anything is
/// communicated, so that a mistake is an error on every rank. If a rank ends or hangs, the others get an error within
/// the timeout, and the group cannot be used any more.
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
    handle: ffi::Group,
    place: Place,
    timeout: Duration,
    failed: AtomicBool,
}

/// Where a rank belongs.
#[derive(Clone, Debug)]
struct Place {
    store: Store,
    prefix: String,
    rank: usize,
    size: usize,
}

impl Place {
    /// Returns the error of a failed operation, with the ranks that have not noticed a failure as well: they have ended,
    /// or hang.
    fn failure(&self, operation: &'static str, error: &Error) -> Error {
        let key = |rank: usize| format!("{}/failed/{rank}", self.prefix);
        let store = self.store.handle();
        let end = Instant::now() + GRACE;
        drop(store.set(&key(self.rank)));
        let is_missing = |rank: &usize| {
            let left = end.saturating_duration_since(Instant::now());
            *rank != self.rank && store.wait(&key(*rank), left).is_err()
        };
        let missing = (0..self.size).filter(is_missing).collect();
        let message = match error {
            Error::Torch(message) => message.clone(),
            other => other.to_string(),
        };
        let (rank, size) = (self.rank, self.size);
        DistributedError::Communication { operation, rank, size, missing, message }.into()
    }
}

impl ProcessGroup {
    /// Forms a group with the default options: see [`GroupOptions::join`].
    ///
    /// # Errors
    ///
    /// As for [`GroupOptions::join`].
    pub fn new(store: &Store, rank: usize, size: usize) -> Result<Self> {
        GroupOptions::default().join(store, rank, size)
    }

    /// Forms the group that the environment describes, with the default options: see [`GroupOptions::from_env`].
    ///
    /// # Errors
    ///
    /// As for [`GroupOptions::from_env`].
    pub fn from_env() -> Result<Self> {
        GroupOptions::default().from_env()
    }

    /// Returns the number of this rank, from zero on.
    pub fn rank(&self) -> usize {
        self.0.place.rank
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.0.place.size
    }

    /// Returns how long an operation waits for the other ranks.
    pub fn timeout(&self) -> Duration {
        self.0.timeout
    }

    /// Runs an operation that communicates. After one has failed, the group cannot be used any more.
    pub(super) fn run<T>(
        &self,
        operation: &'static str,
        call: impl FnOnce(&ffi::Group) -> Result<T>,
    ) -> Result<T> {
        if self.0.failed.load(Ordering::Relaxed) {
            return Err(DistributedError::Failed { operation }.into());
        }
        call(&self.0.handle).map_err(|error| {
            // Other errors are those of a closure of the user's.
            if !matches!(error, Error::Torch(_)) {
                return error;
            }
            self.0.failed.store(true, Ordering::Relaxed);
            self.0.place.failure(operation, &error)
        })
    }
}

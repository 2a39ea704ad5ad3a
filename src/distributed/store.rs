//! Stores.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::{DistributedError, Error, Result};
use crate::ffi::distributed as ffi;

/// How long a rank waits for a store, as in PyTorch.
pub(super) const TIMEOUT: Duration = Duration::from_secs(300);

/// How long a rank waits before it tries again to reach a store.
const RETRY: Duration = Duration::from_millis(100);

/// A dictionary that all ranks share, through which they find each other: c10d's `TCPStore` or `HashStore`.
///
/// Clones are the same store. One process serves it, usually that of rank 0, and has to live as long as the groups that
/// were formed through it. Ranks that are threads of one process share a store of [`in_process`](Self::in_process);
/// each one needs a connection of its own to any other store.
#[derive(Clone, Debug)]
pub struct Store(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    store: ffi::Store,
    /// The host and the port, or `None` for a store without them.
    address: Option<(String, u16)>,
    is_local: bool,
    /// The rank that serves it, if that is known.
    served_by: Option<usize>,
    /// The prefix of the names of all groups.
    scope: String,
    /// The number of unnamed groups that each rank has formed.
    groups: Mutex<HashMap<usize, usize>>,
}

impl Store {
    fn new(store: ffi::Store, address: Option<(&str, u16)>, is_local: bool) -> Self {
        let (served_by, scope, groups) = (None, String::new(), Mutex::default());
        let address = address.map(|(host, port)| (host.to_owned(), port));
        Self(Arc::new(Shared { store, address, is_local, served_by, scope, groups }))
    }

    /// Makes a store for ranks that are threads of this process. Corresponds to `HashStore`.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if libtorch fails.
    pub fn in_process() -> Result<Self> {
        Ok(Self::new(ffi::Store::in_process(TIMEOUT)?, None, true))
    }

    /// Serves a store for processes of this machine, on 127.0.0.1 and a free port, which [`port`](Self::port) returns.
    ///
    /// # Errors
    ///
    /// [`DistributedError::Store`] if it cannot be served.
    pub fn serve_locally() -> Result<Self> {
        Self::serve_on_loopback(0)
    }

    /// Serves a store on 127.0.0.1 and this port, or a free one if it is 0.
    pub(super) fn serve_on_loopback(port: u16) -> Result<Self> {
        let address = ("127.0.0.1", port);
        let bound = TcpListener::bind(address).and_then(|listener| {
            let port = listener.local_addr()?.port();
            Ok((listener, port))
        });
        let (listener, port) = bound.map_err(|error| unusable(address.0, port, &error))?;
        let store = ffi::Store::serve_on(listener.into(), address.0, port, TIMEOUT)
            .map_err(|error| unusable(address.0, port, &error))?;
        Ok(Self::new(store, Some((address.0, port)), true))
    }

    /// Serves a store on a port of all interfaces of this host, for ranks on several hosts. It has no authentication:
    /// the port must not be reachable from outside a private network.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for port 0; [`DistributedError::Store`] if it cannot be served, for instance because
    /// the port is in use.
    pub fn serve(port: u16) -> Result<Self> {
        check(port)?;
        let host = "localhost";
        let store =
            ffi::Store::serve(host, port, TIMEOUT).map_err(|error| unusable(host, port, &error))?;
        Ok(Self::new(store, Some((host, port)), false))
    }

    /// Connects to the store that another process serves, and waits up to five minutes for it.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for port 0; [`DistributedError::Store`] if it cannot be reached.
    pub fn connect(host: &str, port: u16) -> Result<Self> {
        Self::connect_within(host, port, TIMEOUT)
    }

    pub(super) fn connect_within(host: &str, port: u16, timeout: Duration) -> Result<Self> {
        check(port)?;
        let name = host.to_owned();
        let connect = move || {
            let left = await_server(&name, port, timeout)?;
            ffi::Store::connect(&name, port, left)
        };
        let store = within(timeout.saturating_add(GRACE), connect)
            .map_err(|error| unusable(host, port, &error))?;
        Ok(Self::new(store, Some((host, port)), is_loopback(host)))
    }

    /// Returns the port, or `None` for a store without one.
    pub fn port(&self) -> Option<u16> {
        self.0.address.as_ref().map(|(_, port)| *port)
    }

    /// Notes that this rank serves the store. To be called before the store is cloned.
    pub(super) fn of_rank(mut self, rank: usize) -> Self {
        if let Some(shared) = Arc::get_mut(&mut self.0) {
            shared.served_by = Some(rank);
        }
        self
    }

    /// Gives the groups other keys than those of the attempts before a restart. To be called before the store is
    /// cloned.
    pub(super) fn of_attempt(mut self, attempt: &str) -> Self {
        if let Some(shared) = Arc::get_mut(&mut self.0) {
            shared.scope = format!("attempt {attempt}, ");
        }
        self
    }

    pub(super) fn served_by(&self) -> Option<usize> {
        self.0.served_by
    }

    /// Returns whether only this machine can reach the store, so that all ranks are on it.
    pub(super) fn is_local(&self) -> bool {
        self.0.is_local
    }

    /// The error of a rank that belongs to another job than rank 0.
    pub(super) fn of_another_job(&self, its_job: &str, job: &str) -> Error {
        let said =
            |job: &str| if job.is_empty() { "has none".to_owned() } else { format!("has {job}") };
        let problem = format!(
            "it is that of another job: rank 0 {}, this rank {}; give each job a port of its own",
            said(its_job),
            said(job)
        );
        match &self.0.address {
            Some((host, port)) => unusable(host, *port, &problem),
            None => Error::InvalidArgument { name: "store", problem },
        }
    }

    pub(super) fn handle(&self) -> &ffi::Store {
        &self.0.store
    }

    /// Returns what the keys of a group begin with, which those of no other group do. A group without a name is the
    /// next one of this rank: all ranks form their groups in the same order.
    pub(super) fn prefix(&self, name: Option<&str>, rank: usize) -> String {
        let scope = &self.0.scope;
        // With its length, no name is the beginning of another one.
        if let Some(name) = name {
            return format!("{scope}named {} {name}", name.len());
        }
        let mut groups = self.0.groups.lock().unwrap_or_else(PoisonError::into_inner);
        let count = groups.entry(rank).or_default();
        *count += 1;
        format!("{scope}group {count}")
    }
}

/// Returns whether a host is this machine under the address that [`Store::serve_locally`] has. Other names are not
/// resolved: that of the host itself often stands for a loopback address, which other hosts cannot reach.
pub(super) fn is_loopback(host: &str) -> bool {
    matches!(host, "localhost" | "127.0.0.1")
}

fn check(port: u16) -> Result<()> {
    if port == 0 {
        let problem = "is 0, but the other ranks have to know it".to_owned();
        return Err(Error::InvalidArgument { name: "port", problem });
    }
    Ok(())
}

/// Waits until something listens at this address, and returns the time that is left. libtorch tries less and less
/// often, at last each minute, so that a rank would miss a store that is served for seconds.
fn await_server(host: &str, port: u16, timeout: Duration) -> Result<Duration> {
    let start = Instant::now();
    loop {
        let tried = TcpStream::connect((host, port));
        let left = timeout.saturating_sub(start.elapsed());
        match tried {
            Ok(_) => return Ok(left.max(RETRY)),
            Err(error) if left.is_zero() || error.kind() == ErrorKind::InvalidInput => {
                return Err(Error::Torch(error.to_string()));
            }
            Err(_) => thread::sleep(RETRY.min(left)),
        }
    }
}

fn unusable(host: &str, port: u16, error: &dyn std::fmt::Display) -> Error {
    DistributedError::Store { address: format!("{host}:{port}"), message: error.to_string() }.into()
}

/// How long a rank waits after a failure for the others: to report it, too, or to be told.
pub(super) const GRACE: Duration = Duration::from_secs(5);

/// Runs a call that talks to a store, and fails if it takes longer than this. If the process that serves the store is
/// stopped or hangs, libtorch waits for its answer without a timeout. The call then goes on in its thread for as long.
pub(super) fn within<T: Send + 'static>(
    limit: Duration,
    call: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let (sender, receiver) = mpsc::channel();
    // Nobody receives the result of a call that took too long.
    let call = move || drop(sender.send(call()));
    let thread = thread::Builder::new().name("tch-amp store".to_owned()).spawn(call);
    thread.map_err(|error| Error::Torch(format!("no thread could be started: {error}")))?;
    receiver.recv_timeout(limit).unwrap_or_else(|_| {
        let message = format!("the store has not answered in {limit:?}");
        Err(Error::Torch(message))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_does_not_return_is_an_error() {
        let (_sender, receiver) = mpsc::channel::<()>();
        let late = within(Duration::from_millis(1), move || Ok(receiver.recv()));
        assert!(late.unwrap_err().to_string().contains("has not answered in 1ms"));
        assert_eq!(within(Duration::MAX, || Ok(2)).unwrap(), 2);
    }
}

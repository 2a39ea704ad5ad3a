//! The membership of a rank in a group, and what the ranks tell each other after a failure.

use std::time::Duration;

use crate::distributed::deadline::{GRACE, within};
use crate::distributed::store::Store;
use crate::error::{DistributedError, Error};

/// How long a rank takes at most to report a failure.
const REPORT: Duration = Duration::from_secs(1);

/// How long the store takes at most to say whether one rank has reported.
const ANSWER: Duration = Duration::from_millis(1);

/// How many characters of a message are reported.
const LONGEST: usize = 2000;

/// The rank of a process whose own is not known, because its variable is wrong.
pub(super) const UNKNOWN: usize = usize::MAX;

/// Where a rank belongs.
#[derive(Clone, Debug)]
pub(super) struct Membership {
    pub(super) store: Store,
    /// That of the keys of the group in the store. No other group has it.
    pub(super) prefix: String,
    /// The name that the program has given to the group.
    pub(super) name: Option<String>,
    pub(super) rank: usize,
    pub(super) size: usize,
}

/// What a rank finds out after a failure.
#[derive(Default)]
struct Reports {
    /// The ranks that have reported nothing.
    missing: Vec<usize>,
    /// What another rank has reported before all others.
    cause: Option<String>,
}

impl Membership {
    /// Reports a failure of this rank. To be called before its connections are closed, so that the rank that has failed
    /// first is also the first one to report it.
    pub(super) fn report(&self, message: &str) {
        let (here, message) = (self.clone(), message.chars().take(LONGEST).collect::<String>());
        // Without the store, the others find out what they can.
        drop(within(REPORT, move || {
            here.set_once("failure", &format!("{} {message}", here.rank))?;
            here.store.handle().set(&here.reported(here.rank), "1")
        }));
    }

    /// Reports the failure of an operation, closes the connections, and returns the error, with the message of the rank
    /// that has failed first, and the ranks that have not noticed a failure: they have ended, or hang.
    pub(super) fn failure(
        &self,
        operation: &'static str,
        message: String,
        close: impl FnOnce(),
    ) -> Error {
        self.report(&message);
        close();
        let Reports { missing, cause } = self.reports();
        let message = match cause {
            Some(cause) if missing.is_empty() => cause,
            Some(cause) => format!("{message}; {cause}"),
            None => message,
        };
        let (rank, size) = (self.rank, self.size);
        DistributedError::Communication { operation, rank, size, missing, message }.into()
    }

    /// Waits until the others have read what this rank has reported, for a while: its process may serve the store.
    pub(super) fn await_reports(&self) {
        drop(self.reports());
    }

    /// Without the store nothing can be found out, but then the rank that served it is missing.
    fn reports(&self) -> Reports {
        let here = self.clone();
        let ranks = u32::try_from(self.size).unwrap_or(u32::MAX);
        let limit = (2 * GRACE).saturating_add(ANSWER.saturating_mul(ranks));
        let missing = || self.store.served_by().into_iter().collect();
        let without_store = |_| Reports { missing: missing(), cause: None };
        within(limit, move || here.read_reports()).unwrap_or_else(without_store)
    }

    fn read_reports(&self) -> Result<Reports, Error> {
        let store = self.store.handle();
        let first = store.get(&format!("{}/failure", self.prefix), GRACE)?;
        let (rank, message) = first.split_once(' ').unwrap_or_default();
        let is_other = rank != self.rank.to_string();
        let cause = is_other.then(|| format!("rank {rank} failed first: {message}"));
        let others = self.others();
        let keys: Vec<_> = others.clone().map(|rank| self.reported(rank)).collect();
        if store.wait(&keys, GRACE).is_ok() {
            return Ok(Reports { missing: Vec::new(), cause });
        }
        let mut missing = Vec::new();
        for (rank, key) in others.zip(&keys) {
            match store.has(key) {
                Ok(true) => {}
                Ok(false) => missing.push(rank),
                // The rank that failed first may have served the store.
                Err(_) if cause.is_some() => return Ok(Reports { missing: Vec::new(), cause }),
                Err(error) => return Err(error),
            }
        }
        Ok(Reports { missing, cause })
    }

    /// The other ranks.
    pub(super) fn others(&self) -> impl Iterator<Item = usize> + Clone + use<> {
        let this = self.rank;
        (0..self.size).filter(move |rank| *rank != this)
    }

    /// The key that a rank sets when it has failed.
    pub(super) fn reported(&self, rank: usize) -> String {
        format!("{}/failed/{rank}", self.prefix)
    }
}

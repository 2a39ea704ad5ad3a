//! The place of a rank in a group, and what it finds out about the others after a failure.

use std::time::{Duration, Instant};

use crate::distributed::deadline::within;
use crate::distributed::store::Store;
use crate::error::{DistributedError, Error};

/// How long a rank waits after a failure for the others to report it, too.
pub(super) const GRACE: Duration = Duration::from_secs(5);

/// How long a rank waits at least for the report of another one, after a missing one has used up the time.
const ANSWER: Duration = Duration::from_millis(200);

/// Where a rank belongs.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) store: Store,
    pub(super) prefix: String,
    pub(super) rank: usize,
    pub(super) size: usize,
}

impl Place {
    /// Returns the error of a failed operation, with the ranks that have not noticed a failure as well: they have
    /// ended, or hang.
    pub(super) fn failure(&self, operation: &'static str, message: String) -> Error {
        let missing = self.missing();
        let (rank, size) = (self.rank, self.size);
        DistributedError::Communication { operation, rank, size, missing, message }.into()
    }

    /// The ranks that do not report a failure of their own. Without the store this cannot be found out, but then the
    /// rank that served it is missing.
    fn missing(&self) -> Vec<usize> {
        let here = self.clone();
        let ranks = u32::try_from(self.size).unwrap_or(u32::MAX);
        let limit = (2 * GRACE).saturating_add(ANSWER.saturating_mul(ranks));
        let without_store = |_| self.store.served_by().into_iter().collect();
        within(limit, move || Ok(here.unreported())).unwrap_or_else(without_store)
    }

    fn unreported(&self) -> Vec<usize> {
        let key = |rank: usize| format!("{}/failed/{rank}", self.prefix);
        let store = self.store.handle();
        if store.set(&key(self.rank)).is_err() {
            return self.store.served_by().into_iter().collect();
        }
        let end = Instant::now() + GRACE;
        let is_missing = |rank: &usize| {
            let left = end.saturating_duration_since(Instant::now()).max(ANSWER);
            *rank != self.rank && store.wait(&key(*rank), left).is_err()
        };
        (0..self.size).filter(is_missing).collect()
    }
}

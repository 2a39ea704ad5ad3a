//! Threads that take turns.

use std::collections::BTreeSet;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crate::panics::lock;

/// Turns, each of which begins when all that were taken before have ended.
#[derive(Debug, Default)]
pub(super) struct Turns {
    taken: Mutex<Taken>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct Taken {
    count: u64,
    /// The numbers of those that have not ended.
    left: BTreeSet<u64>,
}

/// A turn, which ends when it is dropped.
#[derive(Debug)]
pub(super) struct Turn {
    turns: Arc<Turns>,
    number: u64,
}

impl Turns {
    /// Takes the next turn, which need not have begun.
    pub(super) fn take(self: &Arc<Self>) -> Turn {
        let mut taken = lock(&self.taken);
        taken.count += 1;
        let number = taken.count;
        taken.left.insert(number);
        Turn { turns: Arc::clone(self), number }
    }
}

impl Turn {
    /// Waits until the turn has begun.
    pub(super) fn wait(&self) {
        let is_early = |taken: &mut Taken| taken.left.first() != Some(&self.number);
        let waited = self.turns.ended.wait_while(lock(&self.turns.taken), is_early);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        lock(&self.turns.taken).left.remove(&self.number);
        self.turns.ended.notify_all();
    }
}

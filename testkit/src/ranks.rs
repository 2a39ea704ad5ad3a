//! Groups of ranks that are threads of this process.

use std::time::Duration;

use tch_amp::distributed::{GroupConfig, ProcessGroup, Store};

/// Long enough for a busy machine, and short enough for a test that fails.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// Calls `f` with each number below `count` on a thread of its own, and returns the results in this order.
pub fn threads<T: Send>(count: usize, f: impl Fn(usize) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let f = &f;
        let threads: Vec<_> = (0..count).map(|number| scope.spawn(move || f(number))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Runs `rank` on threads that form a group, and returns the results in the order of the ranks.
pub fn ranks<T: Send>(size: usize, rank: impl Fn(ProcessGroup) -> T + Sync) -> Vec<T> {
    let options = GroupConfig { timeout: TIMEOUT, ..Default::default() };
    let store = Store::in_process().unwrap();
    threads(size, |number| rank(options.join(&store, number, size).unwrap()))
}

//! Groups of ranks, as threads of this process and as processes of their own.

mod accumulation;
mod agreement;
mod causes;
mod collectives;
mod data_parallel;
mod ddp;
mod explained;
mod failures;
#[cfg(target_os = "linux")]
mod hosts;
// These read in /proc which processes there are.
#[cfg(target_os = "linux")]
mod kills;
mod mean;
mod nccl;
mod own_arithmetic;
mod passes;
mod precision;
mod processes;
mod random;
mod rank_0;
mod recomputed;
mod rendezvous;
mod resuming;
mod sampler;
mod saves;
mod sharded;
#[cfg(target_os = "linux")]
mod soak;
#[cfg(target_os = "linux")]
mod spawn;
mod stores;
mod sync_batch_norm;
#[cfg(target_os = "linux")]
mod system;
mod training;

use std::time::Duration;

use tch_amp::distributed::{GroupConfig, ProcessGroup, Store};

/// Long enough for a busy machine, and short enough for a test that fails.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Runs `rank` on threads that form a group, and returns the results in the order of the ranks.
fn ranks<T: Send>(size: usize, rank: impl Fn(ProcessGroup) -> T + Sync) -> Vec<T> {
    let options = GroupConfig { timeout: TIMEOUT, ..Default::default() };
    let store = Store::in_process().unwrap();
    std::thread::scope(|scope| {
        let spawn = |number| {
            let (store, rank, options) = (&store, &rank, &options);
            scope.spawn(move || rank(options.join(store, number, size).unwrap()))
        };
        let threads: Vec<_> = (0..size).map(spawn).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

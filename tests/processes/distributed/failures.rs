//! Ranks that leave, hang or do not come.

use std::time::{Duration, Instant};

use tch_amp::Error;
use tch_amp::distributed::{DistributedError, GroupConfig, ProcessGroup, Store};

use super::{assert_open, ranks, sum, threads};

/// In the larger groups, not every rank is a neighbour of the one that leaves.
#[test]
fn a_rank_that_leaves_is_named_on_every_rank() {
    for (size, leaver) in [(3, 1), (4, 2), (5, 2)] {
        let start = Instant::now();
        ranks(size, |group| {
            assert_open(&group);
            if group.rank() == leaver {
                return;
            }
            let error = sum(&group).unwrap_err();
            let Error::Distributed(DistributedError::Communication {
                missing, rank, size: of, ..
            }) = error
            else {
                panic!("{error}");
            };
            assert_eq!((missing, rank, of), (vec![leaver], group.rank(), size));
            let again = sum(&group);
            assert!(matches!(again, Err(Error::Distributed(DistributedError::Failed { .. }))));
        });
        assert!(start.elapsed() < super::TIMEOUT / 2, "{size} ranks");
    }
}

#[test]
fn after_a_hang_a_new_group_goes_on() {
    let store = Store::in_process().unwrap();
    let short = GroupConfig { timeout: Duration::from_millis(1500), ..Default::default() };
    let start = Instant::now();
    threads(2, |rank| {
        let group = short.join(&store, rank, 2).unwrap();
        if rank == 1 {
            std::thread::sleep(Duration::from_secs(12));
        }
        let error = sum(&group).unwrap_err();
        if rank == 0 {
            assert!(error.to_string().contains("rank 1 does not answer"), "{error}");
            assert!(start.elapsed() < Duration::from_secs(12));
        }
        drop(group);
        let longer = GroupConfig { timeout: super::TIMEOUT, ..Default::default() };
        assert_open(&longer.join(&store, rank, 2).unwrap());
    });
}

#[test]
fn a_rank_that_never_comes_is_named() {
    let store = Store::in_process().unwrap();
    let options = GroupConfig { timeout: Duration::from_millis(500), ..Default::default() };
    let error = options.join(&store, 0, 2).unwrap_err();
    let is_named = matches!(
        &error,
        Error::Distributed(DistributedError::Communication { missing, .. }) if missing == &[1]
    );
    assert!(is_named, "{error}");
    let rank = options.join(&store, 2, 2).unwrap_err();
    assert!(matches!(rank, Error::InvalidArgument { name: "rank", .. }));
}

#[test]
fn a_monitored_barrier_names_the_missing_ranks() {
    ranks(3, |group| {
        if group.rank() == 2 {
            std::thread::sleep(Duration::from_secs(4));
            return;
        }
        let error = group.monitored_barrier(Duration::from_secs(1)).unwrap_err().to_string();
        if group.rank() == 0 {
            assert!(error.contains("Ranks 2 failed to pass monitoredBarrier"), "{error}");
        }
    });
}

#[test]
fn groups_and_stores_go_in_any_order() {
    let store = Store::in_process().unwrap();
    let group = ProcessGroup::new(&store, 0, 1).unwrap();
    let clone = group.clone();
    drop(store);
    drop(group);
    assert_open(&clone);
    clone.barrier().unwrap();
    clone.monitored_barrier(Duration::from_secs(1)).unwrap();
}

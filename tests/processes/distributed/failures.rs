//! Ranks that leave, hang or do not come.

use std::time::{Duration, Instant};

use tch::Tensor;
use tch_amp::Error;
use tch_amp::distributed::{DistributedError, GroupConfig, ProcessGroup, ReduceOp, Store};

use super::ranks;

fn sum(group: &ProcessGroup) -> Result<i64, Error> {
    let mut one = Tensor::from(1i64);
    group.all_reduce(&mut one, ReduceOp::Sum)?;
    Ok(one.int64_value(&[]))
}

#[test]
fn a_rank_that_leaves_is_named_on_every_rank() {
    ranks(3, |group| {
        assert_eq!(sum(&group).unwrap(), 3);
        if group.rank() == 1 {
            return;
        }
        let error = sum(&group).unwrap_err();
        let Error::Distributed(DistributedError::Communication { missing, rank, size, .. }) = error
        else {
            panic!("{error}");
        };
        assert_eq!((missing, rank, size), (vec![1], group.rank(), 3));
        let again = sum(&group);
        assert!(matches!(again, Err(Error::Distributed(DistributedError::Failed { .. }))));
    });
}

#[test]
fn a_failure_reaches_the_ranks_that_are_not_neighbours() {
    for size in [4, 5] {
        let start = Instant::now();
        let missing = ranks(size, |group| {
            assert_eq!(sum(&group).unwrap(), size as i64);
            if group.rank() == 2 {
                return Vec::new();
            }
            let error = sum(&group).unwrap_err();
            let Error::Distributed(DistributedError::Communication { missing, .. }) = error else {
                panic!("{error}");
            };
            missing
        });
        for (rank, missing) in missing.into_iter().enumerate() {
            assert_eq!(missing, if rank == 2 { vec![] } else { vec![2] }, "rank {rank} of {size}");
        }
        assert!(start.elapsed() < super::TIMEOUT / 2);
    }
}

#[test]
fn after_a_hang_a_new_group_goes_on() {
    let store = Store::in_process().unwrap();
    let short = GroupConfig { timeout: Duration::from_millis(1500), ..Default::default() };
    let start = Instant::now();
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let (store, short) = (&store, &short);
            scope.spawn(move || {
                let group = short.join(store, rank, 2).unwrap();
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
                assert_eq!(sum(&longer.join(store, rank, 2).unwrap()).unwrap(), 2);
            });
        }
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
    assert_eq!(sum(&clone).unwrap(), 1);
    clone.barrier().unwrap();
    clone.monitored_barrier(Duration::from_secs(1)).unwrap();
}

//! Ranks that do not belong together: every one gets an error that says so, in seconds.

use std::process::Child;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use tch::Device;
use tch::nn::VarStore;
use tch_amp::distributed::{
    DistributedDataParallel, DistributedError, GroupConfig, ProcessGroup, Store,
};
use tch_amp::{Error, Result};

use super::processes::{free_port, only_line, spawn_rank};
use super::{TIMEOUT, assert_open, ranks, threads};

/// Far less than the timeout of the groups.
const SECONDS: Duration = Duration::from_secs(20);

fn options() -> GroupConfig {
    GroupConfig { timeout: TIMEOUT, ..Default::default() }
}

/// What the ranks and sizes get that join a store at the same time.
fn join(store: &Store, members: &[(usize, usize)]) -> Vec<Result<ProcessGroup>> {
    let start = Instant::now();
    let joined = threads(members.len(), |number| {
        let (rank, size) = members[number];
        options().join(store, rank, size)
    });
    assert!(start.elapsed() < SECONDS, "{:?}", start.elapsed());
    joined
}

#[test]
fn ranks_that_expect_different_sizes_all_learn_it() {
    let store = Store::in_process().unwrap();
    let refused: Vec<_> = join(&store, &[(0, 3), (1, 3), (2, 4)])
        .into_iter()
        .map(|joined| joined.unwrap_err().to_string())
        .collect();
    for refused in &refused {
        assert!(refused.contains("is 4 on rank 2, but 3 on rank 0"), "{refused}");
    }
    // The next group is not disturbed.
    assert!(join(&store, &[(0, 2), (1, 2)]).iter().all(Result::is_ok));
}

#[test]
fn two_processes_of_one_rank_are_refused_before_the_group_is_complete() {
    let named = GroupConfig { name: Some("a".to_owned()), ..options() };
    let store = Store::in_process().unwrap();
    let start = Instant::now();
    threads(3, |number| {
        let refused = named.join(&store, [0, 1, 1][number], 3).unwrap_err().to_string();
        assert!(refused.contains("rank 1 has already used this name"), "{refused}");
    });
    assert!(start.elapsed() < SECONDS);
}

#[test]
fn a_name_that_was_used_is_refused_on_all_ranks_and_the_group_goes_on() {
    let store = Store::in_process().unwrap();
    let named = GroupConfig { name: Some("a".to_owned()), ..options() };
    let start = Instant::now();
    threads(2, |rank| {
        let first = named.join(&store, rank, 2).unwrap();
        for _ in 0..2 {
            let refused = named.join(&store, rank, 2).unwrap_err();
            let is_name = matches!(refused, Error::InvalidArgument { name: "name", .. });
            assert!(is_name && refused.to_string().contains("\"a\""), "{refused}");
        }
        assert_open(&first);
        drop(first);
        // Not when the group is gone, either.
        assert!(named.join(&store, rank, 2).is_err());
    });
    assert!(start.elapsed() < SECONDS);
}

#[test]
fn names_of_groups_do_not_meet_those_of_models_and_of_unnamed_groups() {
    ranks(2, |group| {
        let vs = VarStore::new(Device::Cpu);
        let weight = vs.root().ones("weight", &[1]);
        let mut ddp = DistributedDataParallel::new(&group, &vs).unwrap();
        let names = [
            "group 1",
            "group 1/model 0",
            "group 1/model 1",
            "model 0 of group 1",
            "named 1 a",
            "a",
            "a/model 0",
            "a/gloo",
            "",
        ];
        let others: Vec<_> = names
            .map(|name| GroupConfig { name: Some(name.to_owned()), ..options() })
            .iter()
            .map(|named| named.join(group.store(), group.rank(), 2).unwrap())
            .collect();
        for group in &others {
            let vs = VarStore::new(Device::Cpu);
            let _weight = vs.root().ones("weight", &[1]);
            drop(DistributedDataParallel::new(group, &vs).unwrap());
        }
        others.iter().for_each(assert_open);
        let loss = ddp.forward(|| &weight * (group.rank() as f64)).unwrap();
        ddp.backward(&loss).unwrap();
        assert_eq!(weight.grad().double_value(&[0]), 0.5);
    });
}

#[test]
fn ranks_that_leave_at_once_do_not_disturb_those_that_are_still_joining() {
    for size in [2, 3, 5] {
        let store = Store::in_process().unwrap();
        for _ in 0..20 {
            let together = Barrier::new(size);
            threads(size, |rank| {
                together.wait();
                drop(options().join(&store, rank, size).unwrap());
            });
        }
    }
}

#[test]
fn absurd_numbers_of_ranks_cost_neither_time_nor_memory() {
    let store = Store::in_process().unwrap();
    for size in [65_537, 2_000_000, 99_999_999_999, usize::MAX] {
        let refused = options().join(&store, 0, size).unwrap_err();
        assert!(matches!(refused, Error::InvalidArgument { name: "size", .. }), "{refused}");
    }
    let start = Instant::now();
    let short = GroupConfig { timeout: Duration::from_millis(500), ..Default::default() };
    let error = short.join(&store, 0, 65_536).unwrap_err();
    assert!(start.elapsed() < SECONDS, "{:?}", start.elapsed());
    let Error::Distributed(DistributedError::Communication { missing, .. }) = &error else {
        panic!("{error}");
    };
    assert_eq!(missing.len(), 65_535);
    assert!(error.to_string().len() < 1000, "{error}");
}

#[test]
fn an_interface_that_one_rank_lacks_is_named_on_all() {
    for lacking in 0..3 {
        let (store, start) = (Store::in_process().unwrap(), Instant::now());
        threads(3, |rank| {
            let interface = (rank == lacking).then(|| "lacking0".to_owned());
            let options = GroupConfig { interface, ..options() };
            let error = options.join(&store, rank, 3).unwrap_err().to_string();
            assert!(error.contains("lacking0") && !error.contains("answer"), "{error}");
        });
        assert!(start.elapsed() < SECONDS);
    }
}

/// A rank of a job, as a process.
fn rank_of(job: Option<&str>, rank: usize, size: usize, port: &str) -> Child {
    let job = job.map(|job| ("TORCHELASTIC_RUN_ID", job));
    spawn_rank("sum", rank, size, port, job.as_slice())
}

#[test]
fn a_rank_of_another_job_on_the_same_port_is_refused_alone() {
    for (job, other) in [(Some("one"), Some("other")), (Some("one"), None), (None, Some("other"))] {
        let (port, start) = (free_port(), Instant::now());
        let first = rank_of(job, 0, 2, &port);
        let stranger = only_line(rank_of(other, 1, 2, &port));
        assert!(stranger.contains("it is that of another job"), "{stranger}");
        let second = rank_of(job, 1, 2, &port);
        let lines = [only_line(first), only_line(second)];
        assert_eq!(lines, ["0 of 3", "1 of 3"]);
        assert!(start.elapsed() < SECONDS);
    }
}

#[test]
fn two_jobs_without_names_on_the_same_port_do_not_mix() {
    let (port, start) = (free_port(), Instant::now());
    let ranks = [0, 1, 1, 0].map(|rank| rank_of(None, rank, 3, &port));
    let lines = ranks.map(only_line);
    let [in_use, already] = ["cannot be used", "rank 1 has already come to this group"];
    let is_named = |line: &String| line.contains(in_use) || line.contains(already);
    assert!(lines.iter().all(is_named), "{lines:?}");
    assert_eq!(lines.iter().filter(|line| line.contains(in_use)).count(), 1, "{lines:?}");
    assert!(start.elapsed() < SECONDS);
}

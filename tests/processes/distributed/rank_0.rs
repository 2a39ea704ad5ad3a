//! What rank 0 does for the others, and what they get if it fails.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use tch::{Device, Kind, Tensor};
use tch_amp::checkpoint::{Checkpoint, CheckpointError, Limits};
use tch_amp::distributed::{DistributedError, ProcessGroup};
use tch_amp::{Error, Result};
use torch_files::{Value, Writer};

use super::{assert_open, calls, ranks};
use testkit::files::Folder;

/// The message of the error that the other ranks get.
fn message(error: Error) -> String {
    match error {
        Error::Distributed(DistributedError::Rank { rank: 0, message }) => message,
        other => panic!("{other}"),
    }
}

#[test]
fn rank_0_works_once_while_the_others_wait() {
    let calls = AtomicUsize::new(0);
    let results = ranks(3, |group| {
        let work = || Ok::<_, Error>(calls.fetch_add(1, Ordering::SeqCst) + 10);
        let done = group.on_rank_0(work).unwrap();
        // The others have waited.
        assert_eq!(calls.load(Ordering::SeqCst), 1);
        done
    });
    assert_eq!(results, [Some(10), None, None]);
}

#[test]
fn every_rank_gets_what_rank_0_has_made() {
    let values = ranks(3, |group| {
        let make = || Ok::<_, Error>((group.rank() as u64 + 7, "seven".to_owned(), f64::INFINITY));
        group.from_rank_0(make).unwrap()
    });
    assert_eq!(values, vec![(7, "seven".to_owned(), f64::INFINITY); 3]);
    ranks(3, |group| {
        let refused = || Err::<u64, _>(Error::Torch("no number".to_owned()));
        let error = group.from_rank_0(refused).unwrap_err();
        assert!(error.to_string().contains("no number"), "{error}");
        assert_open(&group);
    });
}

#[test]
fn a_failed_save_is_an_error_on_every_rank() {
    ranks(3, |group| {
        let mut checkpoint = Checkpoint::new();
        checkpoint.add_value("step", &3).unwrap();
        let error = group.on_rank_0(|| checkpoint.save("/no/such/folder/run.safetensors"));
        let error = error.unwrap_err();
        if group.rank() == 0 {
            assert!(matches!(error, Error::Checkpoint(CheckpointError::Save(_))), "{error}");
        } else {
            assert!(message(error).contains("/no/such/folder"));
        }
        assert_open(&group);
        // Errors of other types.
        let full =
            || Err::<(), _>(anyhow::Error::from(io::Error::from(io::ErrorKind::StorageFull)));
        let error = group.on_rank_0(full).unwrap_err();
        assert!(format!("{error:#}").contains("no storage space"), "{error:#}");
        assert_eq!(error.is::<io::Error>(), group.rank() == 0);
        assert_open(&group);
    });
}

#[test]
fn a_panic_of_rank_0_reaches_the_others_as_an_error() {
    ranks(2, |group| {
        let work = || -> Result<()> { panic!("planned") };
        let done = catch_unwind(AssertUnwindSafe(|| group.on_rank_0(work)));
        match group.rank() {
            0 => assert_eq!(*done.unwrap_err().downcast::<&str>().unwrap(), "planned"),
            _ => assert_eq!(message(done.unwrap().unwrap_err()), "a panic: planned"),
        }
        assert_open(&group);
    });
}

#[test]
fn nothing_is_done_if_the_ranks_disagree() {
    let never = || -> Result<()> { unreachable!("it ran") };
    type Call = fn(&ProcessGroup) -> Result<()>;
    let others: [Call; 2] = [ProcessGroup::barrier, |group| group.from_rank_0(|| Ok(()))];
    for other in others {
        ranks(2, move |group| {
            let refused = match group.rank() {
                0 => group.on_rank_0(never).map(drop),
                _ => other(&group),
            };
            assert_eq!(calls(refused.unwrap_err())[0], "on_rank_0");
            assert_open(&group);
        });
    }
}

/// The other ranks have an error, and rank 0 does not wait for them, whatever the work makes of its own.
#[test]
fn work_that_uses_the_group_is_an_error_of_all_ranks_at_once() {
    type Work = fn(&ProcessGroup) -> Result<()>;
    let works: [Work; 3] = [
        ProcessGroup::barrier,
        |group| group.barrier().or(Ok(())),
        |group| group.on_rank_0(|| Ok(())).map(drop),
    ];
    for work in works {
        let start = Instant::now();
        ranks(2, |group| {
            let error = group.on_rank_0(|| work(&group)).unwrap_err().to_string();
            let is_named = error.contains("rank 1 calls the end of on_rank_0")
                || group.rank() == 0 && error.contains("work has used the group");
            assert!(is_named, "{error}");
            assert_open(&group);
        });
        assert!(start.elapsed() < super::TIMEOUT / 2);
    }
}

#[test]
fn all_ranks_get_the_checkpoint_of_rank_0() {
    // More than is sent at a time.
    let large = || Tensor::arange(2_500_000, (Kind::Float, Device::Cpu));
    let folder = Folder::new();
    for (name, in_memory) in [("run.safetensors", false), ("run.pt", false), ("", true)] {
        let path = folder.file(name);
        let fresh = || {
            let mut checkpoint = Checkpoint::new();
            checkpoint.add_tensor("large", &large()).unwrap();
            checkpoint.add_value("step", &f64::INFINITY).unwrap();
            checkpoint
        };
        if !in_memory {
            fresh().save(&path).unwrap();
        }
        ranks(3, |group| {
            let load = || {
                assert_eq!(group.rank(), 0);
                let mut checkpoint = if in_memory { fresh() } else { Checkpoint::load(&path)? };
                if name == "run.pt" {
                    checkpoint.add_value("later", &1)?;
                }
                Ok(Some(checkpoint))
            };
            let checkpoint = Checkpoint::from_rank_0(&group, load).unwrap().unwrap();
            assert_eq!(checkpoint.value::<f64>("step").unwrap(), f64::INFINITY);
            assert_eq!(checkpoint.contains("later"), name == "run.pt");
            let tensor = checkpoint.tensor("large").unwrap();
            assert_eq!(tensor, large());
            assert_open(&group);
        });
    }
}

/// The other ranks get the bytes within the limits of rank 0, which has read them.
#[test]
fn a_large_file_that_rank_0_trusts_reaches_every_rank() {
    let (_folder, path) = Folder::with("large.pt");
    let trusted = Limits { max_values: 5_000_000, ..Limits::default() };
    let numbers = Value::List(vec![Value::Int(1); 2_100_000]);
    let root = Value::Dict(vec![("numbers".into(), numbers), ("step".into(), Value::Int(7))]);
    let none: [Vec<u8>; 0] = [];
    let _durable = Writer::torch(&root, none, &trusted).unwrap().save(&path).unwrap();
    assert!(Checkpoint::load(&path).is_err());
    let steps = ranks(2, |group| {
        let load = || Checkpoint::load_with(&path, &trusted).map(Some);
        let checkpoint = Checkpoint::from_rank_0(&group, load).unwrap().unwrap();
        checkpoint.value::<u64>("step").unwrap()
    });
    assert_eq!(steps, [7, 7]);
}

#[test]
fn no_checkpoint_and_a_failed_load_reach_every_rank() {
    let folder = Folder::new();
    ranks(2, |group| {
        assert!(Checkpoint::from_rank_0(&group, || Ok(None)).unwrap().is_none());
        let load = || Checkpoint::load(folder.file("missing.pt")).map(Some);
        let error = Checkpoint::from_rank_0(&group, load).unwrap_err();
        match group.rank() {
            0 => assert!(matches!(error, Error::Checkpoint(CheckpointError::Io { .. }))),
            _ => assert!(message(error).contains("missing.pt")),
        }
        assert_open(&group);
    });
}

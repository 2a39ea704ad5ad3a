//! Errors of the disk at each call: the result is either an error and the old file, or success and the new file.

use std::io::{self, BufWriter, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use super::log::{Call, Fault, When, names};
use super::loss::outcomes;
use super::memory::Memory;
use super::{content, fill_with, place};
use crate::atomic::{Replaced, Target, replace_on};
use crate::error::{Error, Result};

const EINTR: i32 = 4;
const EIO: i32 = 5;
const EEXIST: i32 = 17;
const ENOSPC: i32 = 28;
const EROFS: i32 = 30;
const EDQUOT: i32 = 122;
const PATH: &str = "/folder/model.bin";

type Outcome = Result<Replaced>;

/// Replaces a file on a disk with a fault. Returns the outcome and the number of calls.
fn save(when: When, fault: Fault, sync_every: u64) -> (Outcome, usize) {
    let path = Path::new(PATH);
    let (old, new) = (content(1, 3000), content(2, 4100));
    let disk = Memory::with(path, Some(&old), sync_every);
    disk.state().fault = Some((when, fault));
    let outcome = replace_on(&disk, &place(path), &mut fill_with(&new, 1300));
    let context = format!("{when:?} {fault:?} {sync_every} {outcome:?}");
    let state = disk.state();
    let in_place = outcomes(&state.ops, path);
    let left = names(&state.ops).len() - 1;
    match &outcome {
        Ok(Replaced::Durable) => {
            assert!(in_place.iter().all(|found| found[path] == new), "{context}")
        }
        Ok(Replaced::Uncertain { .. }) => {
            let whole = |file: &Vec<u8>| *file == old || *file == new;
            assert!(in_place.iter().all(|found| whole(&found[path])), "{context}");
        }
        Err(_) => assert!(in_place.iter().all(|found| found[path] == old), "{context}"),
    }
    // A file whose creation reported an error may belong to another process, so it is kept, empty.
    let created = matches!((state.calls.last(), fault), (Some(Call::Create), Fault::Late(_)));
    let reported = matches!(outcome, Err(Error::Leftover { .. }));
    assert_eq!(left, usize::from(reported || created), "{context}");
    (outcome, state.calls.len())
}

#[test]
fn any_call_may_fail() {
    let mut points = 0;
    for sync_every in [u64::MAX, 1000] {
        let faults = [ENOSPC, EDQUOT, EROFS, EIO, EINTR].map(Fault::Fails);
        let late = [EIO, EINTR].map(Fault::Late);
        for fault in faults.into_iter().chain(late).chain([Fault::Short]) {
            for at in 0.. {
                let (outcome, calls) = save(When::At(at), fault, sync_every);
                if at >= calls {
                    assert!(matches!(outcome, Ok(Replaced::Durable)), "{outcome:?}");
                    break;
                }
                points += 1;
            }
        }
        for at in 0..16 {
            drop(save(When::From(at), Fault::Fails(ENOSPC), sync_every));
            points += 1;
        }
    }
    println!("{points} calls failed");
}

#[test]
fn each_error_is_named() {
    let fails = |call, sync_every| {
        let outcome = save(When::Every(call), Fault::Fails(EIO), sync_every).0;
        let (cause, message) = match &outcome {
            Err(error @ Error::Io { cause, .. }) => (cause, error.to_string()),
            Ok(unsure @ Replaced::Uncertain { cause, .. }) => (cause, unsure.to_string()),
            other => panic!("{other:?}"),
        };
        assert_eq!(cause.raw_os_error(), Some(EIO), "{message}");
        message.strip_suffix(&format!(": {cause}")).unwrap().to_owned()
    };
    let never = u64::MAX;
    assert_eq!(fails(Call::OpenFolder, never), "cannot open the folder /folder");
    let created = fails(Call::Create, never);
    assert!(created.starts_with("cannot create /folder/.model.bin."), "{created}");
    assert_eq!(fails(Call::Write, never), format!("cannot write {PATH}"));
    assert_eq!(fails(Call::Seek, never), format!("cannot write {PATH}"));
    assert_eq!(fails(Call::SyncAll, never), format!("cannot sync {PATH}"));
    assert_eq!(fails(Call::Rename, never), format!("cannot rename {PATH}"));
    let unsure = |action| {
        format!("{PATH} is whole, but after a power loss it may be the old file: cannot {action}")
    };
    assert_eq!(fails(Call::SyncFolder, never), unsure("sync the folder"));
    // The error of the thread is reported by a later write or, if there is none, by the sync.
    let thread = fails(Call::SyncData, 1000);
    assert!(thread == format!("cannot write {PATH}") || thread == format!("cannot sync {PATH}"));
    let last = fails(Call::SyncData, 4100);
    assert_eq!(last, format!("cannot sync {PATH}"));
    let late = save(When::Every(Call::Rename), Fault::Late(EIO), never).0.unwrap();
    assert!(late.to_string().starts_with(&unsure("rename")), "{late}");
}

/// Also one that was interrupted: the bytes before it are written, and must not be written again.
#[test]
fn a_failed_sync_stops_the_writing() {
    for error in [EIO, EINTR] {
        let path = Path::new(PATH);
        let disk = Memory::with(path, Some(b"old"), 1);
        disk.state().fault = Some((When::Every(Call::SyncData), Fault::Fails(error)));
        let start = Instant::now();
        let mut fill = |target: &mut dyn Target| {
            while start.elapsed() < Duration::from_secs(5) {
                target.write_all(b"more")?;
                thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        };
        let outcome = replace_on(&disk, &place(path), &mut fill).unwrap_err();
        assert!(outcome.to_string().starts_with(&format!("cannot write {PATH}: ")), "{outcome}");
    }
}

#[test]
fn an_existing_temporary_name_is_skipped() {
    let taken = Fault::Fails(EEXIST);
    assert!(matches!(save(When::At(1), taken, u64::MAX).0, Ok(Replaced::Durable)));
    let (outcome, calls) = save(When::Every(Call::Create), taken, u64::MAX);
    assert!(matches!(outcome, Err(Error::Io { action: "create", .. })), "{outcome:?}");
    assert_eq!(calls, 1001);
}

#[test]
fn a_temporary_file_that_cannot_be_removed_is_named() {
    let outcome = save(When::From(3), Fault::Fails(EIO), u64::MAX).0.unwrap_err();
    let Error::Leftover { path, cause, .. } = &outcome else { panic!("{outcome}") };
    assert!(path.to_str().unwrap().starts_with("/folder/.model.bin."), "{outcome}");
    assert!(cause.to_string().starts_with(&format!("cannot write {PATH}: ")), "{cause}");
}

#[test]
fn an_error_that_fill_ignores_is_reported() {
    let (path, new) = (Path::new(PATH), content(2, 100));
    for call in [Call::Write, Call::SyncData] {
        let disk = Memory::with(path, Some(b"old"), 1);
        disk.state().fault = Some((When::Every(call), Fault::Fails(EIO)));
        // A BufWriter that is dropped writes its buffer and ignores errors.
        let mut fill = |target: &mut dyn Target| BufWriter::new(target).write_all(&new);
        let outcome = replace_on(&disk, &place(path), &mut fill).unwrap_err();
        assert!(matches!(outcome, Error::Io { .. }), "{outcome}");
        assert_eq!(names(&disk.state().ops).len(), 1);
    }
}

#[test]
fn after_a_panic_or_an_error_of_fill_nothing_is_left() {
    let path = Path::new(PATH);
    for sync_every in [u64::MAX, 1] {
        let disk = Memory::with(path, Some(b"old"), sync_every);
        let mut panics = |target: &mut dyn Target| {
            target.write_all(b"half")?;
            panic!("in fill")
        };
        let saved = || replace_on(&disk, &place(path), &mut panics);
        assert!(catch_unwind(AssertUnwindSafe(saved)).is_err());
        let mut fails = |target: &mut dyn Target| {
            target.write_all(b"half")?;
            Err(io::Error::other("no more"))
        };
        let error = replace_on(&disk, &place(path), &mut fails).unwrap_err();
        assert_eq!(error.to_string(), format!("cannot write {PATH}: no more"));
        let state = disk.state();
        assert_eq!(names(&state.ops).len(), 1);
        assert!(outcomes(&state.ops, path).iter().all(|found| found[path] == b"old"));
    }
}

//! The same with real system calls: killed before each of them, or with an error injected into each.

use std::collections::BTreeMap;

use super::kills::LENGTH;
use super::traced::{Traced, at_each_call, available, run};
use super::{content, fill_with, replaced};
use crate::atomic::replace;

#[test]
fn a_kill_before_any_system_call_leaves_a_complete_file() {
    if !available() {
        return;
    }
    let (mut covered, mut old, mut left) = (BTreeMap::<_, usize>::new(), 0, 0);
    for role in ["once", "overlapping"] {
        at_each_call(role, "signal=SIGKILL", |name, context, killed| {
            *covered.entry(name.to_owned()).or_default() += usize::from(killed.injected);
            old += usize::from(!killed.is_new(context));
            left += killed.leftovers();
            // A leftover does not prevent the next save.
            let path = killed.folder.join("model.bin");
            replaced(replace(&path, &mut fill_with(&content(2, LENGTH), LENGTH)));
            assert!(killed.is_new(context));
        });
    }
    let points: usize = covered.values().sum();
    println!("killed at {points} points {covered:?}: {old} times the old file, {left} leftovers");
}

#[test]
fn an_error_of_any_system_call_leaves_a_complete_file() {
    if !available() {
        return;
    }
    let mut outcomes = BTreeMap::<_, usize>::new();
    for role in ["once", "overlapping"] {
        for error in ["ENOSPC", "EIO", "EINTR"] {
            at_each_call(role, &format!("error={error}"), |name, context, failed| {
                let is_new = failed.is_new(context);
                match failed.code {
                    Some(0) => {
                        // Rust's close reports no error. By then, all data have been synced.
                        let may = name == "close" || error == "EINTR" || !failed.injected;
                        assert!(is_new && may, "{context}");
                    }
                    // The folder could not be synced.
                    Some(3) => assert!(is_new && name == "fsync", "{context}"),
                    Some(5) => assert!(!is_new, "{context}"),
                    _ => panic!("{context}"),
                }
                assert_eq!(failed.leftovers(), 0, "{context}");
                *outcomes.entry((name.to_owned(), error, failed.code)).or_default() += 1;
            });
        }
    }
    println!("{} errors:", outcomes.values().sum::<usize>());
    for ((name, error, code), times) in outcomes {
        println!("{name} {error}: {times} times exit code {code:?}");
    }
}

#[test]
fn the_system_calls_are_in_order() {
    if !available() {
        return;
    }
    for role in ["once", "overlapping"] {
        let run = run(role, 0, None);
        let folder = format!("<{}>", run.folder.0.display());
        let place = |last: bool, found: &dyn Fn(&Traced) -> bool| {
            let place = if last {
                run.calls.iter().rposition(found)
            } else {
                run.calls.iter().position(found)
            };
            place.unwrap()
        };
        let is = |call: &Traced, name: &str| call.name.starts_with(name);
        let temporary = |call: &Traced| call.line.contains("/.model.bin.");
        let order = [
            place(false, &|call| is(call, "openat") && call.line.contains("O_EXCL")),
            place(true, &|call| is(call, "write") && temporary(call)),
            place(true, &|call| is(call, "fsync") && temporary(call)),
            place(true, &|call| is(call, "rename") && temporary(call)),
            place(true, &|call| is(call, "fsync") && call.line.contains(&folder)),
        ];
        assert!(order.is_sorted_by(|a, b| a < b), "{role}: {order:?}");
        let overlapped = run.calls.iter().filter(|call| call.name == "fdatasync").count();
        assert_eq!(overlapped > 0, role == "overlapping");
        println!(
            "{role}: {} calls, {overlapped} of them fdatasync, in order {order:?}",
            run.calls.len()
        );
    }
}

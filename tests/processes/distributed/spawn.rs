//! Ranks that a program starts itself.

use std::os::unix::process::parent_id;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use tch::Tensor;
use tch_amp::Error;
use tch_amp::distributed::{self, GroupConfig, ProcessGroup, ReduceOp};

use super::system::{Running, children, ignores, is_alive, is_stopped, kill, wait_until};
use testkit::programs::this_test_by;

/// What [`program`] is to do.
const TASK: &str = "TCH_AMP_TEST_TASK";
/// How long its ranks may take to end, in milliseconds.
const GRACE: &str = "TCH_AMP_TEST_GRACE";

/// A program that calls `spawn`, through a shell that runs `before` first.
fn command(task: &str, before: &str) -> Command {
    let words = ["sh", "-c", &format!("{before} exec \"$0\" \"$@\"")];
    let mut command = this_test_by(&words, "distributed::spawn::program");
    command
        .env(TASK, task)
        .env(GRACE, "3600000")
        .env_remove("OMP_NUM_THREADS")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// What a process printed after `: `, in the order of the lines.
fn said(who: &str, output: &Output) -> Vec<String> {
    let text = String::from_utf8_lossy(&output.stdout);
    let start = format!("{who}: ");
    let lines = text.lines().filter_map(|line| line.split_once(&start));
    let mut lines: Vec<_> = lines.map(|(_, line)| line.to_owned()).collect();
    lines.sort();
    lines
}

#[test]
#[ignore = "a program that the other tests start"]
fn program() {
    let Ok(task) = std::env::var(TASK) else { return };
    let grace = Duration::from_millis(std::env::var(GRACE).unwrap().parse().unwrap());
    if task != "sum" && std::env::var_os("RANK").is_some() {
        rank(&task);
    }
    let options =
        GroupConfig { timeout: super::TIMEOUT, grace_period: grace, ..Default::default() };
    match options.spawn(2) {
        Ok(Some(group)) => sum(&group),
        Ok(None) => println!("parent: finished"),
        Err(error) => println!("parent: {error}"),
    }
    println!("parent: {} left", children(std::process::id()).len());
}

/// What a rank does instead of joining the group.
fn rank(task: &str) -> ! {
    let rank = std::env::var("RANK").unwrap();
    println!("process: {}", std::process::id());
    println!("threads: {}", std::env::var("OMP_NUM_THREADS").unwrap_or_default());
    match (task, rank.as_str()) {
        ("exit", "1") => std::process::exit(3),
        ("abort", "0") => std::process::abort(),
        ("stop", "0") => kill("STOP", std::process::id()),
        ("stop", _) => {
            wait_until(|| children(parent_id()).into_iter().any(is_stopped));
            std::process::exit(4)
        }
        _ => {}
    }
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}

fn sum(group: &ProcessGroup) -> ! {
    let mut sum = Tensor::from(group.rank() as i64 + 1);
    group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    let names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"];
    let variables = names.map(|name| std::env::var(name).unwrap()).join(" ");
    assert_eq!(variables.split(' ').nth(1), Some(&*distributed::local_rank().unwrap().to_string()));
    let last = std::env::args().next_back().unwrap();
    println!("rank: {variables} {last} has {}", sum.int64_value(&[]));
    std::process::exit(0)
}

/// A program whose ranks wait, and the ranks.
fn waiting(before: &str) -> (Running, [u32; 2]) {
    let mut program = Running::start(&mut command("wait", before));
    let ranks = [(); 2].map(|()| program.after("process: ").parse().unwrap());
    (program, ranks)
}

#[test]
fn spawned_ranks_form_a_group() {
    let output = command("sum", "").output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    let ranks = ["0 0 2 2 1 --nocapture has 3", "1 1 2 2 1 --nocapture has 3"];
    assert_eq!(said("rank", &output), ranks, "{errors}");
    assert_eq!(said("parent", &output), ["0 left", "finished"]);
}

#[test]
fn a_process_that_is_a_rank_starts_nothing() {
    // It joins the group that the environment describes, which is incomplete here.
    let output = command("sum", "").env("RANK", "0").env_remove("MASTER_ADDR").output().unwrap();
    let said = said("parent", &output);
    assert_eq!((said[0].as_str(), said.len()), ("0 left", 2), "{said:?}");
    assert!(said[1].contains("MASTER_ADDR"), "{said:?}");
}

#[test]
fn a_rank_that_fails_is_named_and_the_others_end() {
    for (task, failure) in [
        ("exit", "rank 1 of 2 has failed (exit status: 3), and the other ranks have been ended"),
        ("abort", "rank 0 of 2 has failed (signal: 6 (SIGABRT)"),
        // SIGTERM alone would not end a stopped process.
        ("stop", "rank 1 of 2 has failed (exit status: 4)"),
    ] {
        let output = command(task, "ulimit -c 0;").env("OMP_NUM_THREADS", "3").output().unwrap();
        assert!(said("threads", &output).contains(&"3".to_owned()));
        let said = said("parent", &output);
        assert_eq!((said[0].as_str(), said.len()), ("0 left", 2), "{said:?}");
        assert!(said[1].starts_with(failure), "{said:?}");
    }
}

#[test]
fn a_rank_that_does_not_end_is_killed_after_the_grace_period() {
    // Programs inherit that a signal is ignored.
    let output = command("exit", "trap '' TERM;").env(GRACE, "300").output().unwrap();
    let said = said("parent", &output);
    assert_eq!(said[0], "0 left");
    assert!(said[1].starts_with("rank 1 of 2 has failed (exit status: 3)"), "{said:?}");
}

#[test]
fn signals_are_passed_on() {
    // A shell may have started this test with some of them ignored.
    let is_ignored = |number| ignores(std::process::id(), number);
    for (signal, number) in [("INT", 2), ("TERM", 15)].into_iter().filter(|(_, n)| !is_ignored(*n))
    {
        let (mut program, ranks) = waiting("");
        kill(signal, program.child.id());
        let error = format!("signal {number} has interrupted the ranks");
        assert_eq!([(); 2].map(|()| program.after("parent: ")), [error, "0 left".to_owned()]);
        assert!(!ranks.into_iter().any(is_alive));
        assert!(program.child.wait().unwrap().success());
    }
}

#[test]
fn an_ignored_signal_remains_ignored() {
    let (mut program, ranks) = waiting("trap '' HUP;");
    let processes = [program.child.id(), ranks[0], ranks[1]];
    assert!(processes.into_iter().all(|process| ignores(process, 1)));
    kill("TERM", program.child.id());
    assert!(program.child.wait().unwrap().success());
}

#[test]
fn ranks_are_killed_with_the_process_that_has_started_them() {
    let (mut program, ranks) = waiting("");
    kill("KILL", program.child.id());
    program.child.wait().unwrap();
    wait_until(|| !ranks.into_iter().any(is_alive));
}

#[test]
fn no_ranks_are_an_error() {
    let refused = ProcessGroup::spawn(0).unwrap_err();
    assert!(matches!(refused, Error::InvalidArgument { name: "ranks", .. }), "{refused}");
}

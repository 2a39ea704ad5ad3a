//! Short training runs, one process of which is killed or stopped at a random moment. Each of the other ranks ends in a
//! typed error, or with the weights of an undisturbed run.

mod rank;
mod run;

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rank::FAILED;
use run::{Disturbance, Ended, Run, Started};
use testkit::programs::number;
use testkit::rng::Rng;

/// How many runs there are at the same time. Most of their time they wait for a rank that does not answer.
const PARALLEL: usize = 4;

/// What an undisturbed run of a size has shown.
struct Reference {
    weights: String,
    time: Duration,
}

impl Reference {
    fn new(size: usize) -> Self {
        let run = Run {
            size,
            started: Started::BySpawn,
            disturbance: Disturbance::Nothing,
            moment: Duration::ZERO,
        };
        let ended = run.run();
        let all: Vec<_> = (0..size).map(|rank| result(&ended, rank)).collect();
        let weights = all[0].and_then(|line| line.strip_prefix("weights "));
        let weights = weights.unwrap_or_else(|| panic!("{}", ended.output)).to_owned();
        assert!(all.iter().all(|line| *line == all[0]), "the ranks have different weights");
        Self { weights, time: ended.time }
    }
}

/// What a rank has printed at its end.
fn result(ended: &Ended, rank: usize) -> Option<&str> {
    let start = format!("rank {rank}: ");
    ended.output.lines().find_map(|line| line.split_once(&start).map(|(_, line)| line))
}

fn any_run(seed: u64, references: &[Reference]) -> Run {
    let mut rng = Rng::new(seed);
    let size = 2 + rng.below(references.len());
    let started = *rng.pick(&[Started::BySpawn, Started::ByAgent, Started::Alone]);
    let rank = rng.below(size);
    let disturbance = match rng.below(4) {
        0 => Disturbance::Stop(rank),
        1 if started == Started::BySpawn && rng.one_in(2) => Disturbance::KillParent,
        _ => Disturbance::Kill(rank),
    };
    let longest = references[size - 2].time.as_micros() as usize;
    Run { size, started, disturbance, moment: Duration::from_micros(rng.below(longest) as u64) }
}

/// Checks how a run has ended, and returns it in words.
fn check(run: Run, ended: &Ended, weights: &str) -> Vec<String> {
    let mut outcomes = Vec::new();
    for rank in 0..run.size {
        let Some(line) = result(ended, rank) else {
            let was_ended = match run.started {
                Started::BySpawn => ended.disturbed,
                _ => run.disturbance == Disturbance::Kill(rank),
            };
            assert!(was_ended, "rank {rank} has printed nothing");
            continue;
        };
        let kind = line.split(' ').next().unwrap();
        let known = ["Communication", "Store", "weights"];
        assert!(known.contains(&kind), "{line}");
        assert!(kind != "weights" || line == format!("weights {weights}"), "rank {rank}: {line}");
        outcomes.push(format!("a rank: {kind}"));
    }
    if run.started == Started::BySpawn {
        outcomes.extend(check_parent(run, ended));
        return outcomes;
    }
    for (rank, status) in ended.statuses.iter().enumerate() {
        let killed = run.disturbance == Disturbance::Kill(rank) && status.signal() == Some(9);
        let expected = matches!(status.code(), Some(0 | FAILED));
        assert!(killed || expected, "rank {rank} has ended with {status}");
    }
    outcomes
}

/// Checks what `spawn` has returned.
fn check_parent(run: Run, ended: &Ended) -> Option<String> {
    let status = ended.statuses[0];
    if run.disturbance == Disturbance::KillParent && status.signal() == Some(9) {
        return Some("spawn: killed".to_owned());
    }
    assert!(status.success(), "spawn has ended with {status}");
    assert!(ended.output.contains("left: 0"), "processes are left");
    let lines = ended.output.lines();
    let mut said = lines.filter_map(|line| Some(line.split_once("parent: ")?.1));
    let said = said.next().unwrap();
    if said == "finished" {
        return Some("spawn: finished".to_owned());
    }
    let failed = |rank: usize, status: &str| {
        said.starts_with(&format!("rank {rank} of {} has failed ({status}", run.size))
    };
    let killed = matches!(run.disturbance, Disturbance::Kill(rank) if failed(rank, "signal: 9"));
    let ended = (0..run.size).any(|rank| failed(rank, &format!("exit status: {FAILED}")));
    assert!(killed || ended, "{said}");
    Some(format!("spawn: {}", if killed { "the killed rank" } else { "a rank with an error" }))
}

#[test]
fn a_run_that_is_killed_at_a_random_moment_ends_in_a_typed_error_or_the_right_result() {
    let runs: usize = number("TCH_AMP_RANK_KILLS").unwrap_or(4) as usize;
    let seed: u64 = number("TCH_AMP_SEED").unwrap_or_else(|| u64::from(std::process::id()) << 20);
    let references: Vec<_> = std::thread::scope(|scope| {
        let references = [2, 3].map(|size| scope.spawn(move || Reference::new(size)));
        references.map(|reference| reference.join().unwrap()).into()
    });
    let (next, counts) = (AtomicUsize::new(0), Mutex::new(BTreeMap::<String, usize>::new()));
    let work = || {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= runs {
                return;
            }
            let seed = seed + i as u64;
            let run = any_run(seed, &references);
            let ended = run.run();
            let again = Again { seed, run, output: &ended.output };
            let mut outcomes = check(run, &ended, &references[run.size - 2].weights);
            drop(again);
            outcomes.push(format!("{:?}", run.started));
            outcomes.push(format!("{:?}, in time: {}", run.disturbance, ended.disturbed));
            let mut counts = counts.lock().unwrap();
            for outcome in outcomes {
                *counts.entry(outcome).or_default() += 1;
            }
        }
    };
    std::thread::scope(|scope| (0..PARALLEL).for_each(|_| drop(scope.spawn(work))));
    println!("{runs} runs: {:#?}", counts.into_inner().unwrap());
}

/// The connection is made, because the system accepts it for a process that is stopped, too.
#[test]
fn a_store_that_never_answers_is_an_error() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let output = rank::command(Duration::from_millis(300), 0)
        .env("RANK", "1")
        .env("WORLD_SIZE", "2")
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", silent.local_addr().unwrap().port().to_string())
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("rank 1: Store") && text.contains("has not answered"), "{text}");
    assert_eq!(output.status.code(), Some(FAILED));
}

/// Prints how to repeat a run whose check panics.
struct Again<'a> {
    seed: u64,
    run: Run,
    output: &'a str,
}

impl Drop for Again<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let Self { seed, run, output } = self;
            eprintln!("TCH_AMP_SEED={seed} TCH_AMP_RANK_KILLS=1: {run:?}\n{output}");
        }
    }
}

//! Random programs of scaler operations, run here and by PyTorch's GradScaler: the outcome of every operation and every
//! bit of the state after it are the same. What differs on purpose stands in tests/oracle/scaler_deviations.py.
//!
//! Python computes on the CPU; ours run there and on the simulated GPUs, alone and with an optimizer on each.
//!
//! `TCH_AMP_PROGRAMS` sets the number of programs, and `TCH_AMP_SEED` runs the one program of a failure again.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod adamw;
mod answer;
#[path = "../common/mod.rs"]
mod common;
mod generate;
mod optimizer;
mod program;
mod run;
mod text;
mod writer;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::ops::Range;
use std::process::{Child, Stdio};
use std::str::FromStr;

use common::gpus_that_round_as_the_cpu;
use common::python::Oracle;
use run::Machine;
use tch::Device;

/// A million operations: about 70 s of one core for the oracle, beside which the Rust side runs.
const PROGRAMS: u64 = 10_000;

/// So many, from the first on, run on each GPU and on both together.
const ON_GPUS: u64 = 400;

/// Every answer that a program can get; enough programs get them all.
const OUTCOMES: [&str; 9] = [
    "ok",
    "stepped",
    "skipped",
    "no-gradients",
    "no-inf-checks",
    "unscaled-twice",
    "unscaled-after-step",
    "stepped-twice",
    "iteration-open",
];

type Outcomes = BTreeMap<String, u64>;

/// Devices, and the seeds of the programs that run there.
type Run = (Vec<Device>, Range<u64>);

fn runs() -> Vec<Run> {
    let seeds = seeds();
    let some = seeds.start..seeds.end.min(seeds.start + ON_GPUS);
    let mut runs = vec![(vec![Device::Cpu], seeds)];
    let gpus = gpus_that_round_as_the_cpu();
    runs.extend(gpus.iter().map(|gpu| (vec![*gpu], some.clone())));
    if gpus.len() > 1 {
        runs.push((gpus, some));
    }
    runs
}

/// Writes the programs of all runs for the oracle.
fn write(runs: Vec<Run>, oracle: &mut impl Write) -> std::io::Result<()> {
    for (devices, seeds) in runs {
        for seed in seeds {
            writeln!(oracle, "{}", generate::program(seed).line(devices[0].is_cuda()))?;
        }
    }
    Ok(())
}

#[test]
fn random_programs_answer_as_pytorch_bit_by_bit() {
    let Some(oracle) = Oracle::find("scaler_programs.py") else {
        return;
    };
    tch::set_num_threads(1);
    let runs = runs();
    let mut python = start(&oracle);
    let mut stdin = python.stdin.take().expect("stdin is piped");
    let writing = runs.clone();
    // A thread of its own: the oracle answers while it reads, and both pipes are small.
    let writer = std::thread::spawn(move || write(writing, &mut stdin));
    let mut answers = BufReader::new(python.stdout.take().expect("stdout is piped"));
    for (devices, seeds) in &runs {
        let mut outcomes = Outcomes::new();
        for seed in seeds.clone() {
            compare(seed, devices, &mut answers, &mut outcomes);
        }
        let (count, ops) = (seeds.end - seeds.start, generate::OPS);
        println!("{count} programs of {ops} operations on {devices:?}: {outcomes:?}");
        if count >= ON_GPUS {
            for outcome in OUTCOMES {
                assert!(outcomes.contains_key(outcome), "no program got the answer {outcome:?}");
            }
        }
    }
    writer.join().expect("the writer ends").expect("the oracle reads its input");
    assert!(python.wait().expect("the oracle ends").success());
}

fn seeds() -> Range<u64> {
    match number("TCH_AMP_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("TCH_AMP_PROGRAMS").unwrap_or(PROGRAMS),
    }
}

fn number(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(u64::from_str(&value).unwrap_or_else(|_| panic!("{name} is a number, not {value:?}")))
}

fn start(oracle: &Oracle) -> Child {
    oracle
        .command()
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("TCH_AMP_PYTHON starts")
}

/// Runs the program of `seed` against the oracle's answers, which follow the initial state in the order of its
/// operations.
fn compare(seed: u64, devices: &[Device], answers: &mut impl BufRead, outcomes: &mut Outcomes) {
    let program = generate::program(seed);
    let mut machine = Machine::new(&program, devices);
    let ops = std::iter::once(None).chain(program.ops.iter().map(Some));
    for (done, op) in ops.enumerate() {
        let mut theirs = String::new();
        answers.read_line(&mut theirs).expect("the oracle prints UTF-8");
        let ours = machine.answer(op);
        if ours != theirs.trim_end() {
            let so_far =
                program.ops[..done].iter().map(|op| format!("\n  {op}")).collect::<String>();
            panic!(
                "TCH_AMP_SEED={seed} differs on {devices:?} at operation {done} of\n  {} {:?}{so_far}\nhere:    {ours}\nPyTorch: {theirs}",
                program.config, program.optimizers,
            );
        }
        let outcome = ours.split(' ').next().unwrap_or_default();
        for part in outcome.split('+') {
            let word = part.split('/').next().unwrap_or_default();
            *outcomes.entry(word.to_owned()).or_default() += 1;
        }
    }
}

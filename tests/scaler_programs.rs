//! Random programs of scaler operations, run here and by PyTorch's GradScaler: the outcome of every operation and every
//! bit of the state after it are the same. What differs on purpose stands in tests/oracle/scaler_deviations.py.
//!
//! `TCH_AMP_PROGRAMS` sets the number of programs, and `TCH_AMP_SEED` runs the one program of a failure again.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

#[path = "scaler_programs/adamw.rs"]
mod adamw;
#[path = "scaler_programs/answer.rs"]
mod answer;
mod common;
#[path = "scaler_programs/generate.rs"]
mod generate;
#[path = "scaler_programs/machine.rs"]
mod machine;
#[path = "scaler_programs/optimizer.rs"]
mod optimizer;
#[path = "scaler_programs/program.rs"]
mod program;
#[path = "scaler_programs/text.rs"]
mod text;
#[path = "scaler_programs/writer.rs"]
mod writer;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::ops::Range;
use std::process::{Child, Stdio};
use std::str::FromStr;

use common::python::Oracle;
use machine::Machine;

/// A million operations: about 70 s of one core for the oracle, beside which the Rust side runs.
const PROGRAMS: u64 = 20_000;

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

#[test]
fn random_programs_answer_as_pytorch_bit_by_bit() {
    let Some(oracle) = Oracle::find("scaler_programs.py") else {
        return;
    };
    tch::set_num_threads(1);
    let seeds = seeds();
    let mut python = start(&oracle);
    let mut stdin = python.stdin.take().expect("stdin is piped");
    let writing = seeds.clone();
    // A thread of its own: the oracle answers while it reads, and both pipes are small.
    let writer = std::thread::spawn(move || {
        writing
            .into_iter()
            .try_for_each(|seed| writeln!(stdin, "{}", generate::program(seed).line()))
    });
    let mut answers = BufReader::new(python.stdout.take().expect("stdout is piped"));
    let mut outcomes = Outcomes::new();
    for seed in seeds.clone() {
        compare(seed, &mut answers, &mut outcomes);
    }
    writer.join().expect("the writer ends").expect("the oracle reads its input");
    assert!(python.wait().expect("the oracle ends").success());
    println!("{} programs of {} operations: {outcomes:?}", seeds.end - seeds.start, generate::OPS);
    if seeds.end - seeds.start >= 1000 {
        for outcome in OUTCOMES {
            assert!(outcomes.contains_key(outcome), "no program got the answer {outcome:?}");
        }
    }
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
fn compare(seed: u64, answers: &mut impl BufRead, outcomes: &mut Outcomes) {
    let program = generate::program(seed);
    let mut machine = Machine::new(&program);
    let ops = std::iter::once(None).chain(program.ops.iter().map(Some));
    for (done, op) in ops.enumerate() {
        let mut theirs = String::new();
        answers.read_line(&mut theirs).expect("the oracle prints UTF-8");
        let ours = machine.answer(op);
        if ours != theirs.trim_end() {
            let so_far =
                program.ops[..done].iter().map(|op| format!("\n  {op}")).collect::<String>();
            panic!(
                "TCH_AMP_SEED={seed} differs at operation {done} of\n  {} {:?}{so_far}\nhere:    {ours}\nPyTorch: {theirs}",
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

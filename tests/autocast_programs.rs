//! Random programs of nested autocast regions, run here and by Python's torch: after every operation the autocast state
//! and every bit of the result are the same, gradients included.
//!
//! `TCH_AMP_PROGRAMS` sets the number of programs, and `TCH_AMP_SEED` runs the one program of a failure again.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]
#![allow(clippy::disallowed_methods, reason = "a test fails by panicking")]

mod common;
#[path = "autocast_programs/generate.rs"]
mod generate;
#[path = "autocast_programs/machine.rs"]
mod machine;
#[path = "autocast_programs/program.rs"]
mod program;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::ops::Range;

use common::python::Oracle;
use machine::{Answer, Machine, Outcome, describe};
use program::{Function, Op};
use tch::Kind;

const PROGRAMS: u64 = 2_000;

/// How often each function worked, by the state it ran in.
type Seen = BTreeMap<(Function, &'static str), u32>;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().expect("a number"))
}

fn seeds() -> Range<u64> {
    match number("TCH_AMP_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("TCH_AMP_PROGRAMS").unwrap_or(PROGRAMS),
    }
}

fn region(answer: &Answer) -> &'static str {
    match (answer.enabled, answer.dtype) {
        (false, _) => "off",
        (true, Kind::BFloat16) => "bf16",
        (true, _) => "f16",
    }
}

/// The program with the two answers to its operation `at`, for the one who has to find out.
fn report(seed: u64, ops: &[Op], at: usize, ours: &Answer, theirs: &Answer) -> String {
    let mut text = format!("TCH_AMP_SEED={seed}, operation {at}:\n");
    for (i, op) in ops[..=at].iter().enumerate() {
        writeln!(text, "{i:3} {op}").expect("a string takes all text");
    }
    let (ours, theirs) = (describe(ours), describe(theirs));
    text + &format!("tch-amp: {ours}\nPyTorch: {theirs}")
}

#[test]
fn random_programs_of_nested_regions_answer_as_pytorch_bit_by_bit() {
    let Some(oracle) = Oracle::find("autocast_programs.py") else {
        return;
    };
    tch::set_num_threads(1);
    let programs: Vec<_> = seeds().map(|seed| (seed, generate::program(seed))).collect();
    let lines: String =
        programs.iter().flat_map(|(_, ops)| ops).map(|op| format!("{op}\n")).collect();
    let printed = oracle.run(&[], &lines);
    let mut theirs = printed.lines().map(Answer::parse);
    let (mut machine, mut seen, mut errors, mut gradients) =
        (Machine::default(), Seen::new(), 0, 0);
    for (seed, ops) in &programs {
        for (at, op) in ops.iter().enumerate() {
            let (ours, theirs) =
                (machine.run(op), theirs.next().expect("an answer for every line"));
            assert!(ours == theirs, "{}", report(*seed, ops, at, &ours, &theirs));
            match (op, &ours.outcome) {
                (_, Outcome::Error(_)) => errors += 1,
                (Op::Grad(_), Outcome::Tensor(..)) => gradients += 1,
                (Op::Compute(function, _), _) => {
                    *seen.entry((*function, region(&ours))).or_default() += 1
                }
                _ => {}
            }
        }
    }
    let operations = lines.lines().count();
    println!(
        "{} programs, {operations} operations, {errors} of them errors on both sides",
        programs.len()
    );
    println!("{gradients} gradients; computed by state: {seen:?}");
    if programs.len() as u64 >= PROGRAMS {
        assert_eq!(seen.len(), 3 * Function::ALL.len(), "a function never worked in some state");
        assert!(errors > 0 && gradients > 0, "the programs no longer reach errors or gradients");
    }
}

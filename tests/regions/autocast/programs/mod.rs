//! Random programs of nested autocast regions, run by this crate and by Python's torch. After every operation, the
//! autocast state and all bits of the result must be the same, including gradients.
//!
//! This crate runs them on the CPU and on the simulated GPUs, whose results have the bits of the CPU. Python computes
//! on the CPU, and for the GPUs it uses the lists of CUDA.
//!
//! `TCH_AMP_PROGRAMS` sets the number of programs, and `TCH_AMP_SEED` repeats the program of a failure.

mod generate;
mod program;
mod run;

use std::collections::BTreeMap;
use std::fmt::Write;

use program::{Function, Op};
use run::{Answer, Machine, Outcome, describe};
use tch::{Device, Kind};
use testkit::gpus_that_round_as_the_cpu;
use testkit::programs::seeds;
use testkit::python::Oracle;
use testkit::simulation::lacks_libraries;

const PROGRAMS: u64 = 2_000;

/// The number of programs that run on each GPU, starting with the first.
const ON_A_GPU: u64 = 400;

/// How often each function succeeded, by the autocast state in which it ran.
type Seen = BTreeMap<(Function, &'static str), u32>;

fn region(answer: &Answer) -> &'static str {
    match (answer.enabled, answer.dtype) {
        (false, _) => "off",
        (true, Kind::BFloat16) => "bf16",
        (true, _) => "f16",
    }
}

/// A program and its seed.
type Seeded = (u64, Vec<Op>);

/// Python's answers to the operations of all programs, one line each, with the lists of `cpu` or `cuda`.
fn answers(oracle: &Oracle, programs: &[Seeded], lists: &str) -> String {
    let lines: String =
        programs.iter().flat_map(|(_, ops)| ops).map(|op| format!("{op}\n")).collect();
    oracle.run(&[lists], &lines)
}

/// The program up to its operation `at`, with both answers, for debugging.
fn report((seed, ops): &Seeded, at: usize, device: Device, both: [&Answer; 2]) -> String {
    let mut text = format!("TCH_AMP_SEED={seed}, operation {at}, on {device:?}:\n");
    for (i, op) in ops[..=at].iter().enumerate() {
        writeln!(text, "{i:3} {op}").expect("writing to a string succeeds");
    }
    let [ours, theirs] = both.map(describe);
    text + &format!("tch-amp: {ours}\nPyTorch: {theirs}")
}

/// Whether both are the same error in other words: of a convolution on null CUDA, where libtorch's own kernels check the
/// dtypes, because cuDNN is missing; or of a saved tensor that was changed, which the crate checks itself where hooks
/// are around what autograd saves.
fn is_told_otherwise(op: &Op, device: Device, both: [&Answer; 2]) -> bool {
    let [ours, theirs] = both;
    let is_alike =
        (ours.enabled, ours.cache, ours.dtype) == (theirs.enabled, theirs.cache, theirs.dtype);
    let (Outcome::Error(ours), Outcome::Error(theirs)) = (&ours.outcome, &theirs.outcome) else {
        return false;
    };
    let is_convolution = matches!(op, Op::Compute(Function::Conv, _));
    let is_hooked = std::env::var_os("TCH_AMP_SAVED_TENSORS").is_some();
    is_alike
        && (device.is_cuda() && lacks_libraries() && is_convolution
            || is_hooked && changed(ours).is_some() && changed(ours) == changed(theirs))
}

/// The versions that the error of a saved tensor which was changed names, with what stands before them but for the type.
fn changed(error: &str) -> Option<[&str; 2]> {
    let (what, tensor) = error.split_once(" has been modified by an inplace operation: [")?;
    let versions = tensor.split_once("is at version ")?.1.split_once(" instead")?.0;
    Some([what, versions])
}

/// Runs the programs on `device` and compares the results with Python's answers. With at least `enough` programs, all
/// intended cases must have occurred.
fn compare(device: Device, programs: &[Seeded], theirs: &str, enough: u64) {
    let mut theirs = theirs.lines().map(Answer::parse);
    let mut machine = Machine::new(device);
    let (mut seen, mut errors, mut gradients) = (Seen::new(), 0, 0);
    for program in programs {
        for (at, op) in program.1.iter().enumerate() {
            let (ours, theirs) =
                (machine.run(op), theirs.next().expect("an answer for every line"));
            let is_same = ours == theirs || is_told_otherwise(op, device, [&ours, &theirs]);
            assert!(is_same, "{}", report(program, at, device, [&ours, &theirs]));
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
    println!(
        "{} programs on {device:?}: {errors} operations are errors on both sides, {gradients} gradients; computed by \
         state: {seen:?}",
        programs.len()
    );
    if programs.len() as u64 >= enough {
        assert_eq!(seen.len(), 3 * Function::ALL.len(), "a function never worked in some state");
        assert!(errors > 0 && gradients > 0, "the programs no longer reach errors or gradients");
    }
}

#[test]
fn random_programs_of_nested_regions_equal_pytorch_bit_by_bit() {
    let Some(oracle) = Oracle::find("autocast_programs.py") else { return };
    tch::set_num_threads(1);
    let seeds = seeds("TCH_AMP_PROGRAMS", PROGRAMS);
    let programs: Vec<_> = seeds.map(|seed| (seed, generate::program(seed))).collect();
    compare(Device::Cpu, &programs, &answers(&oracle, &programs, "cpu"), PROGRAMS);
    let gpus = gpus_that_round_as_the_cpu();
    if gpus.is_empty() {
        return;
    }
    let some = &programs[..programs.len().min(ON_A_GPU as usize)];
    let theirs = answers(&oracle, some, "cuda");
    gpus.iter().for_each(|device| compare(*device, some, &theirs, ON_A_GPU));
}

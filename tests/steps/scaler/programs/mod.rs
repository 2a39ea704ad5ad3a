//! Random programs of scaler operations, run by this crate and by PyTorch's GradScaler: the outcome of every operation
//! and all bits of the state after it must be equal. Intended differences are listed in
//! tests/oracle/scaler_deviations.py.
//!
//! Python computes on the CPU. This crate runs there and on the simulated GPUs, each alone and with an optimizer on
//! each. `on_gpu` is for GPUs that Python has, too: real ones, whose kernels round otherwise.
//!
//! `TCH_AMP_PROGRAMS` sets the number of programs, and `TCH_AMP_SEED` repeats the program of a failure.

mod adamw;
mod answer;
mod generate;
mod on_gpu;
mod optimizer;
mod program;
mod run;
mod writer;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::ops::Range;
use std::process::{Child, Stdio};

use run::Machine;
use tch::Device;
use testkit::gpus_that_round_as_the_cpu;
use testkit::programs::seeds;
use testkit::python::Oracle;

/// A hundred thousand operations: about 20 s on one core for the oracle, in parallel to which the Rust side runs.
const PROGRAMS: u64 = 2_000;

/// The number of programs that run on each GPU and on both together, starting with the first.
const ON_GPUS: u64 = 400;

/// All outcomes that an operation can have. Enough programs must produce all of them.
const OUTCOMES: [&str; 11] = [
    "ok",
    "stepped",
    "skipped",
    "no-gradients",
    "no-inf-checks",
    "unscaled-twice",
    "unscaled-after-step",
    "stepped-twice",
    "iteration-open",
    "shared",
    "changed",
];

type Outcomes = BTreeMap<String, u64>;

/// Devices, and the seeds of the programs that run on them.
type Run = (Vec<Device>, Range<u64>);

fn runs() -> Vec<Run> {
    let seeds = seeds("TCH_AMP_PROGRAMS", PROGRAMS);
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
fn random_programs_equal_pytorch_bit_by_bit() {
    let Some(oracle) = Oracle::find("scaler_programs.py") else { return };
    tch::set_num_threads(1);
    let runs = runs();
    let mut python = start(&oracle);
    let mut stdin = python.stdin.take().expect("stdin is piped");
    let writing = runs.clone();
    // On a thread of its own, because the oracle answers while it reads, and both pipes are small.
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
    writer.join().expect("the writer does not panic").expect("the oracle reads its input");
    assert!(python.wait().expect("the oracle exits").success());
}

fn start(oracle: &Oracle) -> Child {
    oracle
        .command()
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("TCH_AMP_PYTHON starts")
}

/// Runs the program of `seed` and compares it with the oracle's answers: the initial state, and then one for each
/// operation.
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
                program.ops[..done].iter().map(|op| format!("\n  {op:?}")).collect::<String>();
            panic!(
                "TCH_AMP_SEED={seed} differs on {devices:?} at operation {done} of\n  {:?} {:?}{so_far}\nhere:    {ours}\nPyTorch: {theirs}",
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

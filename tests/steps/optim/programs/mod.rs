//! Random training runs, compared bit by bit with `torch.optim` with `fused=True` and `torch.amp.GradScaler`. Python
//! computes on the CPU. This crate runs there and on the simulated GPUs, each alone and with parameters on both.
//!
//! `TCH_AMP_OPTIM_PROGRAMS` sets the number of programs, and `TCH_AMP_SEED` repeats one. `walk` is about states that are
//! saved and loaded, without PyTorch. `on_gpu` is for GPUs that Python has, too: real ones, whose kernels round
//! otherwise.

mod generate;
mod on_gpu;
mod run;
mod walk;

use generate::Program;
use run::Machine;
use tch::Device;
use testkit::gpus_that_round_as_the_cpu;
use testkit::programs::seeds;
use testkit::python::Oracle;

const PROGRAMS: u64 = 1000;

/// The number of programs that run on each GPU and on both together, starting with the first.
const ON_GPUS: usize = 300;

/// A program and its seed.
type Seeded = (u64, Program);

/// The programs in the form that the oracle reads.
fn lines(devices: &[Device], programs: &[Seeded]) -> String {
    let gpus = devices.iter().filter(|device| device.is_cuda()).count();
    programs.iter().map(|(_, program)| program.json(gpus).to_string() + "\n").collect()
}

/// The first tensor that differs. For each parameter, its own values come before its state.
fn difference(ours: &str, theirs: &str) -> String {
    for (param, (ours, theirs)) in ours.split(' ').zip(theirs.split(' ')).enumerate() {
        let (ours, theirs): (Vec<_>, Vec<_>) =
            (ours.split(',').collect(), theirs.split(',').collect());
        for place in 0..ours.len().max(theirs.len()) {
            let [ours, theirs] =
                [&ours, &theirs].map(|parts| parts.get(place).unwrap_or(&"nothing"));
            if ours != theirs {
                let what = format!("parameter {param} (the scale comes last), tensor {place}");
                return format!("{what}\nhere:    {ours}\nPyTorch: {theirs}");
            }
        }
    }
    "the numbers of parameters differ".to_owned()
}

/// Runs the programs with their parameters on these devices in turn, and compares the results with Python's.
fn compare<'a>(
    devices: &[Device],
    programs: &[Seeded],
    mut answers: impl Iterator<Item = &'a str>,
) {
    let (mut skipped, mut taken) = (0, 0);
    for (seed, program) in programs {
        let mut machine = Machine::new(program, devices);
        for (index, step) in program.steps.iter().enumerate() {
            let stepped = machine.step(step);
            let place = format!("TCH_AMP_SEED={seed}, step {index} on {devices:?}");
            assert_eq!(stepped, !step.overflow, "{place}");
            if stepped {
                taken += 1
            } else {
                skipped += 1
            }
            let theirs = answers.next().expect("an answer for each step");
            let ours = machine.told();
            let what = program.summary();
            assert!(ours == theirs, "{place} of {what}\n{}", difference(&ours, theirs));
        }
    }
    println!("{} programs on {devices:?}: {taken} steps taken, {skipped} skipped", programs.len());
    if programs.len() > 100 {
        assert!(
            skipped > programs.len() / 4 && taken > programs.len(),
            "the programs should include taken and skipped steps"
        );
    }
}

#[test]
fn training_equals_pythons_bit_by_bit() {
    let Some(oracle) = Oracle::find("optim_programs.py") else { return };
    // PyTorch's norms, unlike this crate's, depend on the number of threads.
    tch::set_num_threads(1);
    let seeds = seeds("TCH_AMP_OPTIM_PROGRAMS", PROGRAMS);
    let programs: Vec<_> = seeds.map(|seed| (seed, generate::program(seed))).collect();
    let some = &programs[..programs.len().min(ON_GPUS)];
    let mut runs = vec![(vec![Device::Cpu], programs.as_slice())];
    let gpus = gpus_that_round_as_the_cpu();
    runs.extend(gpus.iter().map(|gpu| (vec![*gpu], some)));
    if gpus.len() > 1 {
        runs.push((gpus, some));
    }
    let answers = oracle.run(
        &[],
        &runs.iter().map(|(devices, programs)| lines(devices, programs)).collect::<String>(),
    );
    let mut answers = answers.lines();
    for (devices, programs) in &runs {
        compare(devices, programs, &mut answers);
    }
}

/// The rows of docs/differences.md, from PyTorch's side; this crate's side is tested in `tests/steps/optim/`.
#[test]
fn pytorch_differs_as_documented() {
    if let Some(oracle) = Oracle::find("optim_deviations.py") {
        assert_eq!(oracle.run(&[], "").trim(), "as the table says");
    }
}

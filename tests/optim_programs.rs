//! Random training runs, beside `torch.optim` with `fused=True` and `torch.amp.GradScaler`, bit by bit.
//!
//! Environment: `TCH_AMP_OPTIM_PROGRAMS` is how many, `TCH_AMP_SEED` runs one.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod common;
#[path = "optim_programs/generate.rs"]
mod generate;
#[path = "optim_programs/machine.rs"]
mod machine;

use common::python::Oracle;
use machine::Machine;

const PROGRAMS: u64 = 3000;

fn number(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name} is a number, not {value:?}")))
}

#[test]
fn training_is_pythons_bit_by_bit() {
    let Some(oracle) = Oracle::find("optim_programs.py") else {
        return;
    };
    // With one thread: PyTorch's norms, not ours, depend on their number.
    tch::set_num_threads(1);
    let seeds = match number("TCH_AMP_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("TCH_AMP_OPTIM_PROGRAMS").unwrap_or(PROGRAMS),
    };
    let programs: Vec<_> = seeds.clone().map(generate::program).collect();
    let lines: String = programs.iter().map(|program| program.json().to_string() + "\n").collect();
    let answers = oracle.run(&[], &lines);
    let mut answers = answers.lines();
    let (mut skipped, mut taken) = (0, 0);
    for (seed, program) in seeds.zip(&programs) {
        let mut machine = Machine::new(program);
        for (index, step) in program.steps.iter().enumerate() {
            let stepped = machine.step(step);
            assert_eq!(stepped, !step.overflow, "TCH_AMP_SEED={seed}, step {index}");
            if stepped {
                taken += 1
            } else {
                skipped += 1
            }
            let theirs = answers.next().expect("an answer for each step");
            let ours = machine.told();
            assert!(
                ours == theirs,
                "TCH_AMP_SEED={seed} differs at step {index} of {}\nhere:    {ours}\nPyTorch: {theirs}",
                program.summary(),
            );
        }
    }
    println!("{} programs: {taken} steps taken, {skipped} skipped", programs.len());
    if programs.len() > 100 {
        assert!(skipped > programs.len() / 4 && taken > programs.len(), "both kinds of step");
    }
}

/// The rows of the README's table, from PyTorch's side; ours is asserted in `tests/optim/`.
#[test]
fn pytorch_differs_as_the_readme_says() {
    if let Some(oracle) = Oracle::find("optim_deviations.py") {
        assert_eq!(oracle.run(&[], "").trim(), "as the table says");
    }
}

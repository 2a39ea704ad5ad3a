//! A whole AMP step on one thread and on all cores, compared with Python's GradScaler and fused AdamW.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark fails by panicking")]

#[path = "common/amp_step.rs"]
mod amp_step;
mod common;
#[path = "common/states.rs"]
mod states;

use amp_step::{Training, Way, check, fused};
use common::{Python, Rounds, print_ratio, print_table, rounds};
use states::Place;
use tch::Device;

fn main() {
    let Some(mut python) = Python::start("optim.py") else {
        return;
    };
    check(&mut python);
    for (numbers, steps) in [(16, 10), (1024, 10), (16384, 5), (65536, 5)] {
        threads(&mut python, numbers, steps);
    }
    drop(python);
    if let Some(mut python) = Python::start("masters.py") {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let suffix = &format!("_{cores}_threads");
        let place = Place { device: Device::Cpu, threads: cores as i32, suffix };
        states::compare(&mut python, place);
    }
}

/// A step on one thread and on all cores.
fn threads(python: &mut Python, numbers: i64, steps: usize) {
    const PARAMETERS: i64 = 160;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut training = Training::new(PARAMETERS, numbers, fused);
    let counts = [1, cores];
    let times = Rounds::run(
        rounds(30),
        || {
            let on = |threads: usize| {
                tch::set_num_threads(threads as i32);
                training.round(steps, Way::Step)
            };
            counts.map(on).to_vec()
        },
        || {
            let mut on = |threads: usize| {
                python.ask(&format!("threads {threads}"));
                python.time(&format!("round {PARAMETERS} {numbers} {steps}"))[0]
            };
            counts.map(&mut on).to_vec()
        },
    );
    tch::set_num_threads(1);
    python.ask("threads 1");
    let rows = [times.row("one thread", 0), times.row("all cores", 1)];
    print_table(
        &format!("{PARAMETERS} x {numbers} numbers, AdamW, on 1 and {cores} threads"),
        &rows,
    );
    let [here, in_python] = [rows[0].ours / rows[1].ours, rows[0].python / rows[1].python];
    println!(
        "{cores} threads are {here:.2} times as fast as one, and in Python {in_python:.2} times"
    );
    print_ratio(&format!("threads_160x{numbers}"), rows[1]);
    println!();
}

//! A whole AMP step, compared with Python's GradScaler and fused AdamW, and with tch's own AdamW.
//!
//! Forward and backward are the same work on both sides and are not timed. Each step has new gradients, because
//! unscaling the same ones repeatedly would end at zero.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark fails by panicking")]

#[path = "common/amp_step.rs"]
mod amp_step;
mod common;

use amp_step::{Training, Way, check, fused};
use common::{Python, Rounds, Row, copy_bandwidth, microseconds, print_ratio, print_table, rounds};
use tch::Device;
use tch::nn::{self, OptimizerConfig as _};

fn main() {
    let Some(mut python) = Python::start("optim.py") else {
        return;
    };
    tch::set_num_threads(1);
    check(&mut python);
    small(&mut python, 160, ["amp_step_160x16", "amp_step_clip_160x16"]);
    small(&mut python, 400, ["amp_step_400x16", "amp_step_clip_400x16"]);
    large(&mut python);
    against_tch();
}

/// Many small parameters: the cost on the host.
fn small(python: &mut Python, parameters: i64, names: [&str; 2]) {
    let rows = measure(python, parameters, 16, rounds(150), 10);
    print_ratio(names[0], rows[0]);
    print_ratio(names[1], rows[1]);
    println!();
}

/// Large parameters: memory traffic.
fn large(python: &mut Python) {
    const PARAMETERS: i64 = 160;
    const NUMBERS: i64 = 65536;
    let rows = measure(python, PARAMETERS, NUMBERS, rounds(40), 5);
    print_ratio("amp_step_160x65536", rows[0]);
    print_ratio("amp_step_clip_160x65536", rows[1]);
    let numbers = (PARAMETERS * NUMBERS) as f64;
    let copied = copy_bandwidth(Device::Cpu, PARAMETERS * NUMBERS);
    for (row, reads) in [(rows[0], 5.0), (rows[1], 5.0)] {
        // Reads: the gradient once for the check, then parameter, gradient and two averages. Writes: three of these.
        let bytes = 4.0 * (reads + 3.0);
        let bandwidth = numbers * bytes / row.ours;
        println!(
            "{}: {bytes} bytes moved for each number, {bandwidth:.1} GB/s, {:.0} % of this machine's copy ({copied:.1} GB/s)",
            row.name,
            100.0 * bandwidth / copied
        );
    }
    println!();
}

fn measure(
    python: &mut Python,
    parameters: i64,
    numbers: i64,
    count: usize,
    steps: usize,
) -> Vec<Row> {
    let mut plain = Training::new(parameters, numbers, fused);
    let mut clip = Training::new(parameters, numbers, fused);
    let mut transaction = Training::new(parameters, numbers, fused);
    let times = Rounds::run(
        count,
        || {
            vec![
                plain.round(steps, Way::Step),
                clip.round(steps, Way::Clip),
                transaction.round(steps, Way::Transaction),
            ]
        },
        || python.time(&format!("round {parameters} {numbers} {steps}")),
    );
    let rows = vec![
        times.row("scale, step, update", 0),
        times.row("scale, step_clip_norm, update", 1),
        times.row("scale, unscale, clip_grad_norm, step, update", 2),
    ];
    print_table(&format!("{parameters} x {numbers} numbers, AdamW, {count} rounds"), &rows);
    rows
}

/// This crate's fused AdamW compared with tch's own, for which the scaler reads the overflow flag before each step.
fn against_tch() {
    let mut ours = Training::new(160, 16, fused);
    let mut tchs = Training::new(160, 16, |vs| nn::AdamW::default().build(vs, 1e-3).unwrap());
    let count = rounds(150);
    let times =
        Rounds::run(count, || vec![ours.round(10, Way::Step)], || vec![tchs.round(10, Way::Step)]);
    let row = times.row("scale, step, update", 0);
    println!(
        "160 x 16 numbers, AdamW: fused {}, tch's own {}",
        microseconds(row.ours),
        microseconds(row.python)
    );
    print_ratio("vs_tch_adamw_160x16", row);
}

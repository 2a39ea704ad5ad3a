//! The cost of entering and leaving an autocast region, compared with Python.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark fails by panicking")]

mod common;

use std::hint::black_box;

use common::{Python, Rounds, nanoseconds, print_ratio, print_table, rounds};
use tch::{Device, Kind, Tensor};
use tch_amp::autocast::{AutocastGuard, autocast_dtype, is_autocast_enabled};
use tch_amp::{Autocast, autocast};

const REGIONS: usize = 10_000;

fn main() {
    let Some(mut python) = Python::start("autocast.py") else {
        return;
    };
    tch::set_num_threads(1);
    assert_eq!(states(), python.ask("states"), "the two sides report or compute different results");
    let count = rounds(150);
    let ours = || vec![a_new_object(), a_guard(), a_closure(), a_reused_object(), nested()];
    let python = || {
        let new = python.time(&format!("new {REGIONS}"))[0];
        let reused = python.time(&format!("reused {REGIONS}"))[0];
        vec![new, new, new, reused, python.time(&format!("nested {REGIONS}"))[0]]
    };
    let times = Rounds::run(count, ours, python);
    let new = times.row("Autocast::new(Cpu).enter()", 0);
    let rows = [
        new,
        times.row("AutocastGuard::new(Cpu)", 1),
        times.row("autocast(Cpu, || ..)", 2),
        times.row("a reused object", 3),
        times.row("a region with one region inside", 4),
    ];
    print_table(&format!("enter and leave, {count} rounds"), &rows);
    print_ratio("autocast_enter_exit", new);
}

fn per_region(mut region: impl FnMut()) -> f64 {
    nanoseconds(|| (0..REGIONS).for_each(|_| region())) / REGIONS as f64
}

fn a_new_object() -> f64 {
    per_region(|| drop(black_box(Autocast::new(black_box(Device::Cpu)).enter().unwrap())))
}

fn a_guard() -> f64 {
    per_region(|| drop(black_box(AutocastGuard::new(black_box(Device::Cpu)).unwrap())))
}

fn a_closure() -> f64 {
    per_region(|| autocast(black_box(Device::Cpu), || black_box(())).unwrap())
}

fn a_reused_object() -> f64 {
    let object = Autocast::new(Device::Cpu);
    per_region(|| drop(black_box(black_box(object).enter().unwrap())))
}

fn nested() -> f64 {
    per_region(|| {
        let _outer = black_box(Autocast::new(Device::Cpu).enter().unwrap());
        let _inner = black_box(Autocast::new(Device::Cpu).enter().unwrap());
    })
}

/// The autocast state and a product before, inside, nested and after: the same text as Python's answer to `states`.
fn states() -> String {
    let mut out = vec![state()];
    {
        let _outer = Autocast::new(Device::Cpu).enter().unwrap();
        out.push(state());
        {
            let _inner = Autocast::new(Device::Cpu).dtype(Kind::Half).enter().unwrap();
            out.push(state());
        }
        {
            let _inner = Autocast::new(Device::Cpu).enabled(false).enter().unwrap();
            out.push(state());
        }
        out.push(state());
    }
    out.push(state());
    out.join(";")
}

fn state() -> String {
    let left = Tensor::from_slice(&[1.0f32, 2.5, -3.0, 0.126]).view([2, 2]);
    let product = left.matmul(&left);
    let values = Vec::<f64>::try_from(product.to_kind(Kind::Double).view(-1)).unwrap();
    let bits = values.iter().map(|value| format!("{:016x}", value.to_bits())).collect::<String>();
    let enabled = is_autocast_enabled(Device::Cpu);
    format!(
        "{enabled} {} {} {bits}",
        name(autocast_dtype(Device::Cpu).unwrap()),
        name(product.kind())
    )
}

fn name(kind: Kind) -> &'static str {
    match kind {
        Kind::Float => "float32",
        Kind::BFloat16 => "bfloat16",
        Kind::Half => "float16",
        _ => "other",
    }
}

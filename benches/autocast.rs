//! The cost of entering and leaving an autocast region, compared with Python.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark fails by panicking")]

mod common;

use std::hint::black_box;

use common::{Python, Rounds, median, nanoseconds, print_ratio, print_table, rounds};
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
    overrides(count);
}

/// What an operator costs in a region with overrides of autocast's lists: one that no region overrides, one that another
/// region overrides, and one that is overridden, beside casts by hand.
fn overrides(count: usize) {
    const CALLS: usize = 1000;
    let x = Tensor::ones([4], (Kind::BFloat16, Device::Cpu));
    let plain = Autocast::new(Device::Cpu);
    let other = plain.keep_in_f32(["sin"]);
    let overridden = plain.keep_in_f32(["relu", "mm"]);
    // It looks the operators up, and registers the kernel that overrides them.
    let first = nanoseconds(|| other.run(|| ()).unwrap());
    let next = nanoseconds(|| overridden.run(|| ()).unwrap());
    assert_eq!(overridden.run(|| x.relu()).unwrap(), x.to_kind(Kind::Float).relu());
    let of = |region: Autocast, f: &dyn Fn() -> Tensor| {
        let calls = || (0..CALLS).for_each(|_| drop(black_box(f())));
        nanoseconds(|| region.run(calls).unwrap()) / CALLS as f64
    };
    // A product that records its gradients: its nodes switch autocast off for themselves.
    let square = x.view([2, 2]);
    let weight = Tensor::eye(2, (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let mut times = [const { Vec::new() }; 8];
    for _ in 0..count {
        times[0].push(of(plain, &|| x.neg()));
        times[1].push(of(other, &|| x.neg()));
        times[2].push(of(plain, &|| x.relu()));
        times[3].push(of(other, &|| x.relu()));
        times[4].push(of(plain, &|| x.to_kind(Kind::Float).relu()));
        times[5].push(of(overridden, &|| x.relu()));
        let off = plain.enabled(false);
        times[6].push(of(off, &|| square.to_kind(Kind::Float).mm(&weight)));
        times[7].push(of(overridden, &|| square.mm(&weight)));
    }
    let [plain, other, named, named_elsewhere, by_hand, overridden, mm_by_hand, mm] =
        times.map(median);
    println!("\nneg of 4 numbers: {plain:.0} ns; {other:.0} ns in a region that overrides others;");
    println!(
        "relu, which another region overrides: {named:.0} ns; {named_elsewhere:.0} ns in a region that overrides others;"
    );
    println!("in f32 {by_hand:.0} ns by hand, and {overridden:.0} ns overridden;");
    println!("mm with gradients: in f32 {mm_by_hand:.0} ns by hand, and {mm:.0} ns overridden");
    println!(
        "the first region with a list of overrides takes {:.2} ms, and {:.2} ms with another list",
        first / 1e6,
        next / 1e6
    );
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

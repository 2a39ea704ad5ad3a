//! The times, calls and bytes of a report, and what is left behind.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use serde::Deserialize;
use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::insight::{Dtype, OperatorReport, Pass, Profiler, named};
use tch_amp::recompute::checkpointed;
use tch_amp::{Autocast, Error, Result};

use crate::insight::alone;
use testkit::rows::rows;

#[derive(Deserialize)]
pub(crate) struct Operator {
    pub(crate) operator: String,
    pub(crate) dtype: Dtype,
    pub(crate) pass: Pass,
    pub(crate) calls: u64,
    pub(crate) seconds: f64,
    pub(crate) bytes_read: u64,
    pub(crate) bytes_written: u64,
    pub(crate) flops: u64,
}

#[derive(Deserialize)]
pub(crate) struct Product {
    pub(crate) operator: String,
    pub(crate) kind: String,
    pub(crate) pass: Pass,
    pub(crate) seconds: f64,
    pub(crate) flops: u64,
}

pub(crate) fn operators(report: &OperatorReport) -> Vec<Operator> {
    rows(report, "operators")
}

pub(crate) fn products(report: &OperatorReport) -> Vec<Product> {
    rows(report, "products")
}

fn row(report: &OperatorReport, operator: &str, dtype: &str) -> Operator {
    let mut rows = operators(report).into_iter();
    let row = rows.find(|row| row.operator == operator && row.dtype == dtype);
    row.unwrap_or_else(|| panic!("no {operator} in {dtype}: {report}"))
}

fn profiler() -> Profiler {
    Profiler::new(&VarStore::new(Device::Cpu)).warm_up(0)
}

/// Reports one run without a model.
pub(crate) fn profiled<T>(f: impl FnMut() -> Result<T>) -> OperatorReport {
    profiler().run(f).unwrap()
}

pub(crate) fn ones(sizes: &[i64]) -> Tensor {
    Tensor::ones(sizes, (Kind::Float, Device::Cpu))
}

#[test]
fn bytes_are_those_of_the_tensors_that_are_read_and_written() {
    let (a, b) = (ones(&[8, 16]), ones(&[16, 4]));
    let mut c = ones(&[100]);
    let report = profiled(|| {
        let _product = a.mm(&b);
        let _half = a.to_kind(Kind::BFloat16);
        let _square = &c * &c;
        drop(c.relu_());
        Ok(())
    });
    let bytes = |operator, dtype| {
        let row = row(&report, operator, dtype);
        (row.calls, row.bytes_read, row.bytes_written)
    };
    assert_eq!(bytes("aten::mm", "fp32"), (1, 4 * (8 * 16 + 16 * 4), 4 * 8 * 4), "{report}");
    assert_eq!(bytes("aten::copy_", "bf16"), (1, 4 * 8 * 16, 2 * 8 * 16), "{report}");
    assert_eq!(bytes("aten::mul", "fp32"), (1, 400, 400), "one tensor, read once: {report}");
    assert_eq!(bytes("aten::clamp_min_", "fp32"), (1, 400, 400), "{report}");
}

/// Two parts of a tensor share its memory, but each is read or written.
#[test]
fn bytes_of_parts_of_a_tensor_add_up() {
    let x = ones(&[4, 8]);
    let report = profiled(|| {
        let parts = x.chunk(2, 0);
        Ok(&parts[0] * &parts[1])
    });
    let product = row(&report, "aten::mul", "fp32");
    assert_eq!((product.bytes_read, product.bytes_written), (4 * 32, 4 * 16), "{report}");
}

/// Operators that call others have a time of their own, without that of the others.
#[test]
fn own_times_add_up_to_no_more_than_the_time_of_the_run() {
    let _alone = alone();
    let vs = VarStore::new(Device::Cpu);
    let net = nn::seq()
        .add(nn::linear(vs.root() / 0, 64, 64, Default::default()))
        .add_fn(Tensor::relu)
        .add(nn::linear(vs.root() / 1, 64, 64, Default::default()));
    let x = ones(&[64, 64]);
    let region = Autocast::new(Device::Cpu);
    let report = Profiler::new(&vs).runs(3).run(|| {
        let loss = region.run(|| net.forward(&x).square().mean(Kind::Float))?;
        Ok(loss.f_backward()?)
    });
    let report = report.unwrap();
    assert!(report.own_seconds() > 0.0, "{report}");
    assert!(report.own_seconds() <= report.seconds, "{report}");
    assert!(report.unrecorded_seconds.is_some());
    assert_eq!(report.runs, 3);
    let names: Vec<_> = operators(&report).into_iter().map(|row| row.operator).collect();
    // They only call others.
    for wrapper in ["aten::linear", "aten::to", "aten::_to_copy", "aten::square", "aten::t"] {
        assert!(!names.iter().any(|name| name == wrapper), "{wrapper}: {report}");
    }
    let forward = row(&report, "aten::addmm", "bf16");
    assert_eq!((forward.pass, forward.calls), (Pass::Forward, 3 * 2), "{report}");
    // Three gradients: the first layer needs none of its input.
    assert_eq!(row(&report, "aten::mm", "bf16").pass, Pass::Backward, "{report}");
    assert_eq!(row(&report, "aten::mm", "bf16").calls, 3 * 3, "{report}");
    let products: f64 = products(&report).iter().map(|row| row.seconds).sum();
    assert!(products <= report.own_seconds(), "{report}");
}

/// A pause between operators is nobody's.
#[test]
fn time_between_operators_does_not_count() {
    let x = ones(&[4]);
    let report = profiled(|| {
        let y = &x + &x;
        std::thread::sleep(Duration::from_millis(30));
        Ok(named("part", || {
            std::thread::sleep(Duration::from_millis(30));
            y * &x
        }))
    });
    assert!(report.seconds >= 0.06, "{report}");
    assert!(report.own_seconds() <= report.seconds - 0.06, "{report}");
}

#[test]
fn a_recomputed_part_belongs_to_the_backward_pass() {
    let x = ones(&[8, 8]).set_requires_grad(true);
    let report = profiled(|| {
        let y = checkpointed(&[&x], |x| Ok(x[0].mm(x[0])))?;
        Ok(y.sum(Kind::Float).f_backward()?)
    });
    let product = 2 * 8 * 8 * 8;
    assert_eq!(report.flops(), (1 + 1 + 2) * product, "{report}");
    let forward = operators(&report).into_iter().filter(|row| row.pass == Pass::Forward);
    let forward: u64 = forward.map(|row| row.flops).sum();
    assert_eq!(forward, product, "{report}");
}

#[test]
fn a_panic_or_an_error_leaves_no_callback_behind() {
    let x = ones(&[4, 4]);
    // More often than there are places for recordings.
    for _ in 0..20 {
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let result = profiler().run(|| -> Result<()> {
                let _y = x.mm(&x);
                panic!("planted");
            });
            drop(result);
        }));
        assert!(panicked.is_err());
        let failed = profiler().run(|| {
            let _y = x.mm(&x);
            let problem = "planted".to_owned();
            Err::<(), _>(Error::InvalidArgument { name: "f", problem })
        });
        assert!(failed.is_err());
    }
    let report = profiled(|| Ok(x.mm(&x)));
    assert_eq!(row(&report, "aten::mm", "fp32").calls, 1);
    assert!(profiler().runs(0).run(|| Ok(())).is_err());
}

#[test]
fn recordings_nest_and_the_outer_one_sees_all() {
    let x = ones(&[4, 4]);
    let outer = profiled(|| {
        let inner = profiled(|| Ok(x.mm(&x)));
        assert_eq!(row(&inner, "aten::mm", "fp32").calls, 1);
        Ok(x.mm(&x))
    });
    assert_eq!(row(&outer, "aten::mm", "fp32").calls, 2);
}

/// Each report has the operators of its own thread.
#[test]
fn threads_are_reported_apart() {
    std::thread::scope(|scope| {
        for size in 2..6_i64 {
            scope.spawn(move || {
                for _ in 0..20 {
                    let x = ones(&[size, size]).set_requires_grad(true);
                    let report = profiled(|| Ok(x.mm(&x).sum(Kind::Float).f_backward()?));
                    let product = 2 * u64::try_from(size * size * size).unwrap();
                    assert_eq!(report.flops(), 3 * product, "{report}");
                }
            });
        }
    });
}

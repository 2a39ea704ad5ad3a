//! The floating-point operations of a report, against plain formulas, and the sizes to be padded.

use serde::Deserialize;
use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::insight::{OperatorReport, Pass, Profiler, named};
use tch_amp::{Autocast, autocast};

use crate::insight::alone;
use crate::insight::report_times::{self, ones, operators, products};
use testkit::rows::rows;

#[derive(Deserialize)]
struct Padding {
    path: Option<String>,
    sizes: Vec<(u64, u64)>,
    flops: u64,
    share: f64,
}

fn padding(report: &OperatorReport) -> Vec<Padding> {
    rows(report, "padding")
}

/// Reports one run without a model.
fn profiled(f: impl Fn()) -> OperatorReport {
    report_times::profiled(|| {
        f();
        Ok(())
    })
}

fn forward(report: &OperatorReport) -> u64 {
    of(report, Pass::Forward)
}

fn backward(report: &OperatorReport) -> u64 {
    of(report, Pass::Backward)
}

fn of(report: &OperatorReport, pass: Pass) -> u64 {
    let rows = operators(report).into_iter().filter(|row| row.pass == pass);
    let flops = rows.map(|row| row.flops).sum();
    let products = products(report).into_iter().filter(|row| row.pass == pass);
    assert_eq!(products.map(|row| row.flops).sum::<u64>(), flops, "{report}");
    flops
}

#[test]
fn products_of_matrices_have_two_operations_for_each_multiplication() {
    let _alone = alone();
    let (a, b) = (ones(&[3, 5]), ones(&[5, 7]));
    let (many_a, many_b) = (ones(&[4, 3, 5]), ones(&[4, 5, 7]));
    let (c, many_c) = (ones(&[3, 7]), ones(&[4, 3, 7]));
    let vector = ones(&[5]);
    let one = 2 * 3 * 5 * 7;
    let cases: [(&str, u64, &dyn Fn() -> Tensor); 12] = [
        ("mm", one, &|| a.mm(&b)),
        ("addmm", one, &|| c.addmm(&a, &b)),
        ("bmm", 4 * one, &|| many_a.bmm(&many_b)),
        ("baddbmm", 4 * one, &|| many_c.baddbmm(&many_a, &many_b, 1, 1)),
        ("addbmm", 4 * one, &|| c.addbmm(&many_a, &many_b)),
        ("matmul", 4 * one, &|| many_a.matmul(&b)),
        ("linear", 4 * one, &|| many_a.linear(&b.tr(), Some(&ones(&[7])))),
        ("linear without bias", 4 * one, &|| many_a.linear(&b.tr(), None::<&Tensor>)),
        ("mv", 2 * 3 * 5, &|| a.mv(&vector)),
        ("addmv", 2 * 3 * 5, &|| ones(&[3]).addmv(&a, &vector)),
        ("dot", 2 * 5, &|| vector.dot(&vector)),
        ("einsum", 4 * one, &|| Tensor::einsum("bij,bjk->bik", &[&many_a, &many_b], None::<i64>)),
    ];
    for (name, flops, f) in cases {
        let report = profiled(|| drop(f()));
        assert_eq!(forward(&report), flops, "{name}: {report}");
        let half = profiled(|| drop(autocast(Device::Cpu, f).unwrap()));
        // A product with a vector is on no list.
        assert_eq!(forward(&half), flops, "{name} in bf16: {half}");
    }
}

#[test]
fn backward_of_a_product_has_one_product_for_each_gradient() {
    let one = 2 * 3 * 5 * 7;
    for (grads, count) in [([true, true], 2), ([true, false], 1), ([false, true], 1)] {
        let a = ones(&[3, 5]).set_requires_grad(grads[0]);
        let b = ones(&[5, 7]).set_requires_grad(grads[1]);
        let report = profiled(|| a.mm(&b).sum(None).backward());
        assert_eq!((forward(&report), backward(&report)), (one, count * one), "{report}");
    }
}

/// The sizes of a convolution: of the input without its batch of two, its channels first, of the weight, and stride,
/// padding, dilation and groups.
struct Convolution {
    x: &'static [i64],
    weight: &'static [i64],
    stride: i64,
    padding: i64,
    dilation: i64,
    groups: i64,
}

impl Convolution {
    /// Counts the multiplications one by one: for each number of the output, those of its group's channels and kernel.
    fn flops(&self) -> u64 {
        let spatial = self.x[1..].iter().zip(&self.weight[2..]);
        let size = |(x, kernel): (&i64, &i64)| {
            (x + 2 * self.padding - self.dilation * (kernel - 1) - 1) / self.stride + 1
        };
        let outputs = 2 * self.weight[0] * spatial.map(size).product::<i64>();
        let per_output = (self.x[0] / self.groups) * self.weight[2..].iter().product::<i64>();
        2 * u64::try_from(outputs * per_output).unwrap()
    }

    fn run(&self, kind: Kind, grads: [bool; 2]) -> OperatorReport {
        let x = ones(&[&[2], self.x].concat()).to_kind(kind).set_requires_grad(grads[0]);
        let weight = ones(self.weight).to_kind(kind).set_requires_grad(grads[1]);
        let bias = ones(&self.weight[..1]).to_kind(kind);
        let n = self.x.len() - 1;
        let [s, p, d] = [self.stride, self.padding, self.dilation].map(|value| vec![value; n]);
        profiled(|| {
            let y = match n {
                1 => x.conv1d(&weight, Some(&bias), s.clone(), p.clone(), d.clone(), self.groups),
                2 => x.conv2d(&weight, Some(&bias), s.clone(), p.clone(), d.clone(), self.groups),
                _ => x.conv3d(&weight, Some(&bias), s.clone(), p.clone(), d.clone(), self.groups),
            };
            y.sum(None).backward();
        })
    }
}

const fn convolution(
    x: &'static [i64],
    weight: &'static [i64],
    [stride, padding, dilation, groups]: [i64; 4],
) -> Convolution {
    Convolution { x, weight, stride, padding, dilation, groups }
}

const CONVOLUTIONS: [Convolution; 8] = [
    convolution(&[3, 8, 9], &[4, 3, 3, 3], [1, 0, 1, 1]),
    convolution(&[3, 8, 9], &[4, 3, 3, 2], [2, 1, 1, 1]),
    convolution(&[6, 8, 9], &[4, 3, 3, 3], [1, 2, 1, 2]),
    convolution(&[6, 8, 9], &[6, 1, 3, 3], [1, 1, 1, 6]),
    convolution(&[3, 8, 9], &[4, 3, 3, 3], [1, 2, 2, 1]),
    convolution(&[3, 9], &[4, 3, 3], [2, 1, 1, 1]),
    convolution(&[2, 5, 6, 7], &[3, 2, 2, 3, 2], [1, 1, 1, 1]),
    convolution(&[2, 8, 8], &[2, 2, 1, 1], [1, 0, 1, 1]),
];

/// f64 takes other kernels than f32: those without oneDNN.
#[test]
fn convolutions_are_counted_with_stride_padding_dilation_and_groups() {
    for (place, case) in CONVOLUTIONS.iter().enumerate() {
        for kind in [Kind::Float, Kind::Double, Kind::BFloat16] {
            for (grads, count) in [([true, true], 2), ([true, false], 1), ([false, true], 1)] {
                let report = case.run(kind, grads);
                let what =
                    format!("convolution {place} in {kind:?}, gradients {grads:?}: {report}");
                assert_eq!(forward(&report), case.flops(), "{what}");
                assert_eq!(backward(&report), count * case.flops(), "{what}");
                assert!(products(&report).iter().all(|row| row.kind == "Convolution"), "{what}");
            }
        }
    }
}

/// Each number of the input is multiplied with the whole kernel of each output channel of its group.
#[test]
fn transposed_convolutions_are_counted() {
    for kind in [Kind::Float, Kind::Double] {
        for (groups, weight) in [(1, [4, 3, 3, 2]), (2, [4, 2, 3, 2])] {
            let x = ones(&[2, 4, 5, 6]).to_kind(kind).set_requires_grad(true);
            let weight_tensor = ones(&weight).to_kind(kind).set_requires_grad(true);
            let none = None::<&Tensor>;
            let report = profiled(|| {
                let y = x.conv_transpose2d(&weight_tensor, none, 2, 1, 1, groups, 1);
                y.sum(None).backward();
            });
            let numbers = 2 * 4 * 5 * 6;
            let flops = u64::try_from(2 * numbers * weight[1] * 3 * 2).unwrap();
            assert_eq!(forward(&report), flops, "{kind:?}, {groups} groups: {report}");
            assert_eq!(backward(&report), 2 * flops, "{kind:?}, {groups} groups: {report}");
        }
    }
}

#[test]
fn attention_is_counted_in_every_kernel() {
    let (batch, heads, rows, columns, size) = (2, 3, 16, 24, 8);
    let q = || ones(&[batch, heads, rows, size]).set_requires_grad(true);
    let k = || ones(&[batch, heads, columns, size]).set_requires_grad(true);
    let (q, k, v) = (q(), k(), k());
    let product = u64::try_from(2 * batch * heads * rows * columns * size).unwrap();
    let attend = |dropout: f64| {
        let none = None::<&Tensor>;
        let y = Tensor::scaled_dot_product_attention(&q, &k, &v, none, dropout, false, None, false);
        y.sum(None).backward();
    };
    // One kernel, whose backward computes the scores again.
    let fused = profiled(|| attend(0.0));
    assert_eq!((forward(&fused), backward(&fused)), (2 * product, 5 * product), "{fused}");
    // With dropout, the CPU uses products of matrices.
    let plain = profiled(|| attend(0.5));
    assert_eq!((forward(&plain), backward(&plain)), (2 * product, 4 * product), "{plain}");
    assert!(products(&plain).iter().all(|row| row.kind == "Matrix"), "{plain}");
}

#[test]
fn the_share_in_half_precision_is_that_of_the_operations() {
    let _alone = alone();
    let (a, b) = (ones(&[8, 16]), ones(&[16, 8]).set_requires_grad(true));
    let report = profiled(|| {
        let half = autocast(Device::Cpu, || a.mm(&b)).unwrap();
        // Three quarters of the products forward, and two of four gradients backward.
        let others = [a.mm(&b), a.mm(&b), a.mm(&b.detach())];
        let sum = others.iter().fold(half.to_kind(Kind::Float), |sum, other| sum + other);
        sum.sum(None).backward();
    });
    assert_eq!(report.half_share(Some(Pass::Forward)), Some(0.25), "{report}");
    assert_eq!(report.half_share(Some(Pass::Backward)), Some(1.0 / 3.0), "{report}");
    assert_eq!(report.half_share(None), Some(2.0 / 7.0), "{report}");
    assert_eq!(profiled(|| drop(a.relu())).half_share(None), None);
}

/// The last layer has ten outputs, forward and in both gradients; the first has sizes of 8 only, and one of 24.
#[test]
fn sizes_are_padded_to_multiples_of_eight() {
    let _alone = alone();
    let vs = VarStore::new(Device::Cpu);
    let first = nn::linear(vs.root() / "first", 16, 24, Default::default());
    let last = nn::linear(vs.root() / "last", 24, 10, Default::default());
    let x = ones(&[32, 16]);
    let run = |dtype: Option<Kind>| {
        let region = Autocast::new(Device::Cpu).enabled(dtype.is_some());
        let iteration = || {
            let loss = region.run(|| {
                let y = last.forward(&first.forward(&x).relu());
                named("extra", || y.mm(&y.detach().tr())).sum(Kind::Float)
            })?;
            Ok(loss.f_backward()?)
        };
        Profiler::new(&vs).run(iteration).unwrap()
    };
    let report = run(Some(Kind::BFloat16));
    let last = 3 * 2 * 32 * 24 * 10;
    let extra = 2 * 2 * 32 * 32 * 10;
    let first = 2 * 2 * 32 * 16 * 24;
    assert_eq!(report.flops(), first + last + extra, "{report}");
    let padded = padding(&report);
    let found: Vec<_> = padded
        .iter()
        .map(|row| (row.path.as_deref(), row.sizes.as_slice(), row.flops, row.share))
        .collect();
    let share = |flops| flops as f64 / report.flops() as f64;
    let sizes = &[(10, 16)][..];
    let expected =
        [(Some("last"), sizes, last, share(last)), (Some("extra"), sizes, extra, share(extra))];
    assert_eq!(found, expected, "{report}");
    assert!(report.to_string().contains("pad 10 to 16  aten::addmm, aten::mm in last"), "{report}");
    assert!(padding(&run(None)).is_empty(), "f32 needs no padding");
}

/// A product with a vector, which padding would slow down.
#[test]
fn products_with_vectors_are_not_padded() {
    let half = |sizes: &[i64]| ones(sizes).to_kind(Kind::BFloat16);
    let (square, vector) = (half(&[16, 16]), half(&[16]));
    let report = profiled(|| {
        drop((square.mv(&vector), vector.dot(&vector), half(&[1, 16]).mm(&square)));
    });
    assert_eq!(products(&report).len(), 3, "{report}");
    assert!(padding(&report).is_empty(), "{report}");
}

/// Autocast calls an operator again, and only this second call computes.
#[test]
fn a_product_in_a_region_is_one_call_with_its_own_time_and_bytes() {
    let _alone = alone();
    let (a, b) = (ones(&[128, 256]), ones(&[256, 64]));
    let many = ones(&[2, 8, 8]);
    let report = profiled(|| {
        autocast(Device::Cpu, || drop((a.mm(&b), many.bmm(&many), a.mm(&b)))).unwrap();
    });
    let operators = operators(&report);
    let row = |name: &str| operators.iter().find(|row| row.operator == name).unwrap();
    assert_eq!((row("aten::mm").calls, row("aten::bmm").calls), (2, 1), "{report}");
    let elements = 128 * 256 + 256 * 64;
    assert_eq!(row("aten::mm").bytes_read, 2 * 2 * elements, "{report}");
    let products = products(&report).into_iter().filter(|row| row.operator == "aten::mm");
    let seconds: f64 = products.map(|row| row.seconds).sum();
    assert_eq!(seconds, row("aten::mm").seconds, "{report}");
}

#[test]
fn a_product_that_fails_is_not_counted() {
    let report = profiled(|| assert!(ones(&[3, 5]).f_mm(&ones(&[7, 2])).is_err()));
    assert_eq!(report.flops(), 0, "{report}");
}

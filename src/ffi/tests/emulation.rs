//! Rounding at random, beside plain loops.

use tch::{Device, Kind, Tensor};

use crate::Autocast;
use crate::ffi::emulation::{Emulated, Emulation, Regions, Rounding};
use crate::function::{GradConfig, grad};
use crate::insight::AutocastList;

fn emulated(dtype: Kind) -> Emulated {
    let (device, lower, f32) = (Device::Cpu, AutocastList::LowerPrecision, AutocastList::F32);
    Emulated { device, dtype, lower: lower.names(device), f32: f32.names(device) }
}

/// Runs `f` in an emulated region.
fn emulate<T>(dtype: Kind, seed: u64, f: impl FnOnce() -> T) -> T {
    let _emulation =
        Emulation::begin(&emulated(dtype), Regions::Emulated, Rounding::Random { seed }).unwrap();
    Autocast::new(Device::Cpu).dtype(dtype).run(f).unwrap()
}

/// Numbers as a product with one, which is on autocast's list.
fn product(x: &Tensor) -> Vec<f32> {
    let one = Tensor::ones([1, 1], (Kind::Float, Device::Cpu));
    Vec::try_from(x.reshape([-1, 1]).matmul(&one).flatten(0, -1)).unwrap()
}

/// The two neighbours of a number in a dtype, by plain arithmetic; both are the number itself if it is exact.
fn neighbours(x: f32, dtype: Kind) -> [f32; 2] {
    let (bits, least) = if dtype == Kind::BFloat16 { (8, -133) } else { (11, -24) };
    let x = f64::from(x);
    if x == 0.0 {
        return [0.0; 2];
    }
    let exponent = x.abs().log2().floor() as i32;
    let step = 2f64.powi((exponent + 1 - bits).max(least));
    let ends = [(x / step).floor() * step, (x / step).ceil() * step];
    ends.map(|end| {
        if dtype == Kind::Half && end.abs() > 65504.0 {
            f32::INFINITY.copysign(end as f32)
        } else {
            end as f32
        }
    })
}

fn numbers() -> Vec<f32> {
    let mut numbers = vec![0.0, -0.0, 1.0, -2.5, 65504.0, 65519.0, 1e-7, -6.1e-5, 5.9e-8, 3.0e-5];
    for i in 0..2000 {
        let x = ((i * 7919 % 2003) as f32 / 1001.5 - 1.0) * 2f32.powi(i % 30 - 15);
        numbers.push(x);
    }
    numbers
}

#[test]
fn results_are_one_of_two_neighbours() {
    for dtype in [Kind::BFloat16, Kind::Half] {
        let xs = numbers();
        let x = Tensor::from_slice(&xs);
        for seed in 0..3 {
            let rounded = emulate(dtype, seed, || product(&x));
            for (&x, &y) in xs.iter().zip(&rounded) {
                let ends = neighbours(x, dtype);
                assert!(ends.contains(&y), "{x:e} in {dtype:?} became {y:e} instead of {ends:?}");
            }
        }
        let random = Rounding::Random { seed: 0 };
        let emulation = Emulation::begin(&emulated(dtype), Regions::Emulated, random).unwrap();
        let outside = product(&x);
        drop(emulation);
        assert_eq!(outside, xs, "outside of a region nothing is rounded");
    }
}

/// Runs `f` in a region that is emulated without any rounding.
fn unrounded<T>(dtype: Kind, f: impl FnOnce() -> T) -> T {
    let _emulation = Emulation::begin(&emulated(dtype), Regions::Emulated, Rounding::None).unwrap();
    Autocast::new(Device::Cpu).dtype(dtype).run(f).unwrap()
}

/// Forward and backward, a cast to half precision, and a gradient that is differentiated.
#[test]
fn without_rounding_every_bit_is_that_of_f32() {
    tch::manual_seed(4);
    let [x, w] =
        [0, 1].map(|_| Tensor::randn([8, 8], (Kind::Float, Device::Cpu)).set_requires_grad(true));
    let derivatives = |dtype: Kind| {
        let y = x.matmul(&w).to_kind(dtype).tanh().matmul(&w).square().sum(Kind::Float);
        let derive = |of: &Tensor, create_graph| {
            let config = GradConfig { create_graph, ..GradConfig::default() };
            let found = grad(&[of], &[&x, &w], &config).unwrap();
            found.into_iter().flatten().collect::<Vec<_>>()
        };
        let first = derive(&y, true);
        let second = derive(&(first[0].square() + first[1].square()).sum(Kind::Float), false);
        let first = first.iter().map(Tensor::detach);
        [y.detach()].into_iter().chain(first).chain(second).collect::<Vec<_>>()
    };
    let plain = derivatives(Kind::Float);
    for dtype in [Kind::BFloat16, Kind::Half] {
        assert_eq!(unrounded(dtype, || derivatives(dtype)), plain, "{dtype:?}");
        assert_ne!(emulate(dtype, 0, || derivatives(dtype)), plain, "{dtype:?}");
    }
}

/// The numbers have fp16's eleven bits, however small or large they are.
#[test]
fn rounding_without_the_range_of_fp16_loses_no_small_or_large_number() {
    let xs: Vec<f32> =
        (0..400).map(|i| (1.0 + i as f32 / 577.0) * 2f32.powi(i % 200 - 100)).collect();
    let unbounded = Rounding::Unbounded { seed: 1 };
    let _emulation = Emulation::begin(&emulated(Kind::Half), Regions::Emulated, unbounded).unwrap();
    let region = Autocast::new(Device::Cpu).dtype(Kind::Half);
    let rounded = region.run(|| product(&Tensor::from_slice(&xs))).unwrap();
    for (x, y) in xs.into_iter().zip(rounded) {
        let step = 2f64.powi(f64::from(x).log2().floor() as i32 - 10);
        let ends = [f64::floor, f64::ceil].map(|to| to(f64::from(x) / step) * step);
        assert!(ends.contains(&f64::from(y)), "{x:e} became {y:e} instead of {ends:?}");
    }
}

#[test]
fn the_mean_is_right_and_equal_numbers_are_rounded_alike() {
    for (dtype, step) in [(Kind::BFloat16, 2f64.powi(-7)), (Kind::Half, 2f64.powi(-10))] {
        // A quarter of the way from 1 to the next number, and three quarters in the subnormal range.
        let xs = [1.0 + 0.25 * step, 3.75 * 2f64.powi(-24)];
        let (up, runs) = ([xs[0] - 0.25 * step + step, 4.0 * 2f64.powi(-24)], 4000);
        let x = Tensor::from_slice(&[xs[0] as f32, xs[1] as f32]).repeat([8]);
        let mut counts = [0; 2];
        for seed in 0..runs {
            let rounded = emulate(dtype, seed, || product(&x));
            for i in 0..2 {
                let here: Vec<f32> = rounded.iter().copied().skip(i).step_by(2).collect();
                assert!(here.iter().all(|&y| y == here[0]), "{here:?}");
                counts[i] += i32::from(f64::from(here[0]) == up[i]);
            }
        }
        let shares = counts.map(|count| f64::from(count) / runs as f64);
        // Four standard deviations.
        assert!((shares[0] - 0.25).abs() < 0.028, "{dtype:?}: {shares:?}");
        if dtype == Kind::Half {
            assert!((shares[1] - 0.75).abs() < 0.028, "{dtype:?}: {shares:?}");
        }
    }
}

#[test]
fn a_tensor_has_one_cast_in_all_its_views() {
    tch::manual_seed(0);
    let x = Tensor::randn([16, 16], (Kind::Float, Device::Cpu));
    let eye = Tensor::eye(16, (Kind::Float, Device::Cpu));
    emulate(Kind::BFloat16, 5, || {
        let cast = x.matmul(&eye);
        assert_eq!(x.transpose(0, 1).matmul(&eye), cast.transpose(0, 1));
        assert_eq!(x.slice(0, 4, 9, 1).matmul(&eye), cast.slice(0, 4, 9, 1));
        // What is half precision already stays as it is.
        assert_eq!(cast.matmul(&eye), cast);
        assert_ne!(x.copy().matmul(&eye), cast, "another tensor has other thresholds");
        let mut changed = x.shallow_clone();
        let _changed = changed.f_mul_scalar_(1.0).unwrap();
        assert_ne!(x.matmul(&eye), cast, "and so has one that was written to");
    });
}

#[test]
fn what_follows_half_precision_is_rounded_and_f32_is_not() {
    tch::manual_seed(1);
    let x = Tensor::randn([8, 8], (Kind::Float, Device::Cpu));
    let is_bf16 = |t: &Tensor| *t == t.to_kind(Kind::BFloat16).to_kind(Kind::Float);
    emulate(Kind::BFloat16, 7, || {
        let half = x.matmul(&x);
        for (name, result, expected) in [
            ("a product", half.shallow_clone(), true),
            ("an operator on no list", half.exp(), true),
            ("promotion", &half * &x, false),
            ("a number", &half * 1.001, true),
            ("a cast to f32", half.to_kind(Kind::Float).exp(), false),
            ("a sum in f32", half.sum(Kind::Float), false),
            ("a cast to bf16", x.to_kind(Kind::BFloat16), true),
            ("the list of f32", half.mse_loss(&x, tch::Reduction::None), false),
            ("f32", x.exp(), false),
            (
                "a normalization",
                half.layer_norm([8], None::<&Tensor>, None::<&Tensor>, 1e-5, true),
                true,
            ),
        ] {
            assert_eq!(result.kind(), Kind::Float, "{name}");
            assert_eq!(is_bf16(&result), expected, "{name}");
        }
        let off = Autocast::new(Device::Cpu).enabled(false);
        assert!(!is_bf16(&off.run(|| x.matmul(&x)).unwrap()), "a region that is switched off");
    });
}

/// In libtorch's promotion of dtypes a tensor without dimensions does not widen one with dimensions, and beside others
/// without dimensions it does. The dtypes are those that libtorch gives to the same operator on bf16.
#[test]
fn a_tensor_without_dimensions_widens_as_in_libtorchs_promotion() {
    tch::manual_seed(3);
    let x = Tensor::randn([8, 8], (Kind::Float, Device::Cpu));
    let is_bf16 = |t: &Tensor| *t == t.to_kind(Kind::BFloat16).to_kind(Kind::Float);
    type Call = fn(&Tensor, &Tensor, &Tensor) -> Tensor;
    let calls: [(&str, Call); 12] = [
        ("a matrix by a number", |half, _, number| half * number),
        ("a number by a matrix", |half, _, number| number * half),
        ("a matrix and a number", |half, _, number| half.g_add(number)),
        ("a quotient", |half, _, number| half / number),
        ("a matrix that has one element", |half, _, number| {
            half.narrow(0, 0, 1).narrow(1, 0, 1) * number
        }),
        ("a number of f32 beside a view of f32", |_, x, number| x * number),
        ("a number of half precision by one of f32", |half, _, number| half.get(0).get(0) * number),
        ("two numbers of half precision", |half, _, _| half.get(0).get(0) * half.get(1).get(1)),
        ("a number of half precision by a matrix of f32", |half, x, _| half.get(0).get(0) * x),
        ("a choice", |half, _, number| half.where_self(&half.gt(0.0), number)),
        ("a sum of products", |half, _, number| half.addcmul(half, number)),
        ("a sum of products of f32", |half, x, number| half.addcmul(x, number)),
    ];
    for number in [1.2345678f32, 3.0] {
        let number = Tensor::from(number);
        for (name, call) in calls {
            let half = x.to_kind(Kind::BFloat16);
            let libtorchs = call(&half, &x, &number).kind();
            let (result, again) = emulate(Kind::BFloat16, 11, || {
                let half = x.to_kind(Kind::BFloat16);
                assert!(is_bf16(&half) && half.kind() == Kind::Float);
                let result = call(&half, &x, &number);
                // What follows shows whether it was marked, even if its own numbers are exact.
                let again = result.sin();
                (result, again)
            });
            let is_half = libtorchs == Kind::BFloat16;
            assert!(is_bf16(&result) || !is_half, "{name} by {number:?}");
            assert_eq!(is_bf16(&again), is_half, "{name} by {number:?}");
        }
    }
}

#[test]
fn gradients_of_half_precision_are_rounded() {
    tch::manual_seed(2);
    let x = Tensor::randn([8, 8], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let w = Tensor::randn([8, 8], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let factor = Tensor::randn([8, 8], (Kind::Float, Device::Cpu));
    emulate(Kind::BFloat16, 9, || {
        let half = x.matmul(&w);
        // An f32 gradient of a half-precision result.
        (half.to_kind(Kind::Float) * &factor).sum(Kind::Float).backward();
    });
    let is_bf16 = |t: &Tensor| *t == t.to_kind(Kind::BFloat16).to_kind(Kind::Float);
    assert!(is_bf16(&x.grad()) && is_bf16(&w.grad()));
    let exact = factor.matmul(&w.detach().transpose(0, 1));
    let error = (x.grad() - &exact).norm().double_value(&[]) / exact.norm().double_value(&[]);
    assert!(error > 1e-3 && error < 2e-2, "{error}");
}

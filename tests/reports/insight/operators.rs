//! The operator and the part that are named.

use rstest::rstest;
use tch::{Device, Kind, Tensor};
use tch_amp::insight::{Cause, Explanation, Pass, named};

use crate::insight::{Model, batch, explain, explain_planted};

type Planted = fn(&Tensor) -> Tensor;

fn half(x: &Tensor) -> Tensor {
    x.to_kind(Kind::Half)
}

/// Has `value` everywhere, and takes part in the graph of `x`.
fn all(x: &Tensor, value: f64) -> Tensor {
    x * 0.0 + value
}

/// What overflows or is undefined in the forward pass, in the part `bad`.
#[rustfmt::skip]
const FORWARD: &[(&str, &str, Planted)] = &[
    ("exp", "aten::exp", |x| all(x, 100.0).exp()),
    ("log", "aten::log", |x| all(x, -1.0).log()),
    ("log_of_zero", "aten::log", |x| all(x, 0.0).log()),
    ("reciprocal", "aten::reciprocal", |x| all(x, 0.0).reciprocal()),
    ("rsqrt", "aten::rsqrt", |x| all(x, 0.0).rsqrt()),
    ("sqrt", "aten::sqrt", |x| all(x, -1.0).sqrt()),
    ("div", "aten::div", |x| x.ones_like() / all(x, 0.0)),
    ("pow", "aten::pow", |x| all(x, 1e20).pow_tensor_scalar(3)),
    ("square", "aten::pow", |x| all(x, 1e20).square()),
    ("mul", "aten::mul", |x| { let big = all(x, 1e20); &big * &big }),
    ("expm1", "aten::expm1", |x| all(x, 100.0).expm1()),
    ("sinh", "aten::sinh", |x| all(x, 100.0).sinh()),
    ("cosh", "aten::cosh", |x| all(x, 100.0).cosh()),
    ("acos", "aten::acos", |x| all(x, 2.0).acos()),
    ("asin", "aten::asin", |x| all(x, 2.0).asin()),
    ("atanh", "aten::atanh", |x| all(x, 1.0).atanh()),
    ("log1p", "aten::log1p", |x| all(x, -1.0).log1p()),
    ("log2", "aten::log2", |x| all(x, 0.0).log2()),
    ("log10", "aten::log10", |x| all(x, 0.0).log10()),
    ("sum", "aten::sum", |x| all(x, 3e38).sum_dim_intlist(1, true, None) + x),
    ("prod", "aten::prod", |x| all(x, 1e20).prod_dim_int(1, true, None) + x),
    ("cumsum", "aten::cumsum", |x| all(x, 3e38).cumsum(1, None)),
    ("cumprod", "aten::cumprod", |x| all(x, 1e20).cumprod(1, None)),
    ("add", "aten::add", |x| { let big = all(x, 3e38); &big + &big }),
    ("sub", "aten::sub", |x| { let big = all(x, 3e38); &big - (-&big) }),
    ("mm", "aten::mm", |x| all(x, 1e20).mm(&(Tensor::ones([4, 4], (Kind::Float, Device::Cpu)) * 1e20))),
    ("bmm", "aten::bmm", |x| { let b = all(x, 1e20).unsqueeze(0); b.bmm(&b.transpose(1, 2)).sum(None) + x }),
    ("half_bmm", "aten::bmm", |x| { let b = half(&all(x, 300.0)).unsqueeze(0); b.bmm(&b.transpose(1, 2)).sum(None) + x }),
    ("half_mm", "aten::mm", |x| { let b = half(&all(x, 300.0)); b.mm(&b.transpose(0, 1)).sum(None) + x }),
    ("half_mul", "aten::mul", |x| { let b = half(&all(x, 300.0)); (&b * &b) + x }),
    ("half_add", "aten::add", |x| { let b = half(&all(x, 60000.0)); (&b + &b) + x }),
    ("half_exp", "aten::exp", |x| half(&all(x, 12.0)).exp() + x),
    ("half_sum", "aten::sum", |x| half(&all(x, 60000.0)).sum(None) + x),
    ("half_square", "aten::pow", |x| half(&all(x, 300.0)).square() + x),
    ("cast", "aten::copy_", |x| half(&all(x, 1e5)) + x),
    ("in_place", "aten::mul_", |x| { let mut big = all(x, 1e20); let factor = big.detach().copy(); big.g_mul_(&factor) }),
    ("in_place_by_itself", "aten::mul_", |x| { let mut big = all(x, 1e20).detach(); let same = big.shallow_clone(); big.g_mul_(&same) + x }),
    ("half_in_place_by_a_view", "aten::add_", |x| { let mut big = half(&all(x, 60000.0)).detach(); let same = big.view([2, 4]); big.g_add_(&same) + x }),
    ("baddbmm", "aten::baddbmm", |x| { let b = all(x, 1e20).unsqueeze(0); let c = b.transpose(1, 2); b.bmm(&c).zeros_like().baddbmm(&b, &c, 1, 1).sum(None) + x }),
    ("softmax_of_masked_row", "aten::_softmax", |x| x.masked_fill(&x.isfinite(), f64::NEG_INFINITY).softmax(1, None)),
    ("div_by_zero_sum", "aten::div", |x| { let centered = all(x, 0.0); &centered / centered.square().sum(None) }),
    ("kl_div", "aten::xlogy", |x| x.kl_div(&all(x, -1.0), tch::Reduction::None, false)),
    ("lerp", "aten::lerp", |x| { let big = all(x, 3e38); big.lerp(&(-&big), -2.0) }),
    ("addcmul", "aten::addcmul", |x| { let big = all(x, 1e20); x.addcmul(&big, &big) }),
    ("addcdiv", "aten::addcdiv", |x| x.addcdiv(&x.ones_like(), &all(x, 0.0))),
    ("logit", "aten::logit", |x| all(x, 1.0).logit(None)),
    ("gelu_after", "aten::exp", |x| all(x, 100.0).exp().gelu("none")),
    ("layer_norm_after", "aten::exp", |x| all(x, 100.0).exp().layer_norm([4], None::<&Tensor>, None::<&Tensor>, 1e-5, false)),
    ("conv", "aten::mkldnn_convolution|aten::_slow_conv2d_forward|aten::thnn_conv2d", |x| {
    let big = all(x, 1e20).reshape([1, 1, 2, 4]);
    let weight = Tensor::full([1, 1, 1, 1], 1e20, (Kind::Float, Device::Cpu));
    big.conv2d(&weight, None::<&Tensor>, 1, 0, 1, 1).sum(None) + x
}),
    // Kernels that make tensors of their own, or pass them to operators that they run.
    ("exp_before_dilated_conv", "aten::exp", |x| f64_exp(x).reshape([1,1,2,4]).conv2d(&Tensor::ones([1,1,2,2],F64), None::<&Tensor>, 1, 2, 2, 1).sum(None) + x),
    ("exp_before_conv3d", "aten::exp", |x| f64_exp(x).reshape([1,1,2,2,2]).conv3d(&Tensor::ones([1,1,2,2,2],F64), None::<&Tensor>, 1, 1, 1, 1).sum(None) + x),
    ("exp_before_conv_transpose", "aten::exp", |x| f64_exp(x).reshape([1,1,2,4]).conv_transpose2d(&Tensor::ones([1,1,2,2],F64), None::<&Tensor>, 1, 0,0,1, 1).sum(None) + x),
    ("exp_before_dilated_conv_transpose", "aten::exp", |x| f64_exp(x).reshape([1,1,2,4]).conv_transpose2d(&Tensor::ones([1,1,2,2],F64), None::<&Tensor>, 1, 0,0,1, 2).sum(None) + x),
    ("exp_before_renorm", "aten::exp", |x| all(x, 100.0).exp().renorm(2.0, 0, 1.0) + x),
    ("exp_before_cdist", "aten::exp", |x| Tensor::cdist(&all(x, 100.0).exp(), &x.ones_like(), 2.0, None).sum(None) + x),
    ("exp_before_inverse", "aten::exp", |x| all(x, 100.0).exp().reshape([2,2,2]).inverse().sum(None) + x),
    ("exp_before_matrix_exp", "aten::exp", |x| all(x, 100.0).exp().reshape([2,2,2]).matrix_exp().sum(None) + x),
    ("exp_before_solve", "aten::exp", |x| Tensor::linalg_solve(&all(x, 100.0).exp().reshape([2,2,2]), &x.reshape([2,2,2]), true).sum(None) + x),
    ("exp_before_std", "aten::exp", |x| all(x, 100.0).exp().std_dim(1, true, true).sum(None) + x),
    ("exp_before_group_norm", "aten::exp", |x| all(x, 100.0).exp().group_norm(2, None::<&Tensor>, None::<&Tensor>, 1e-5, false) + x),
    ("exp_before_det", "aten::exp", |x| all(x, 100.0).exp().reshape([2, 2, 2]).det().sum(None) + x),
    ("f64_conv", "aten::addmm|aten::addmm_|aten::_slow_conv2d_forward|aten::baddbmm_", |x| f64_conv(&all(x, 1e30), 1e300) + x),
];

const F64: (Kind, Device) = (Kind::Double, Device::Cpu);

/// Infinite after the exponential.
fn f64_exp(x: &Tensor) -> Tensor {
    all(x, 100.0).exp().to_kind(Kind::Double)
}

/// A convolution in f64 with a kernel of 3 by 3.
fn f64_conv(x: &Tensor, weight: f64) -> Tensor {
    let weight = Tensor::full([1, 1, 3, 3], weight, F64);
    let x = x.to_kind(Kind::Double).reshape([1, 1, 2, 4]);
    x.conv2d(&weight, None::<&Tensor>, 1, 1, 1, 1).sum(None)
}

/// What is finite forward, and has an infinite or undefined derivative: the forward operator.
#[rustfmt::skip]
const BACKWARD: &[(&str, &str, Planted)] = &[
    ("sqrt", "aten::sqrt", |x| all(x, 0.0).sqrt()),
    ("pow", "aten::pow", |x| all(x, 0.0).pow_tensor_scalar(0.5)),
    ("where_of_log", "aten::log", |x| {
    // A selected value is finite, and the derivative of the other one is not: 0 * inf.
    let zero = all(x, 0.0);
    zero.log().where_self(&zero.gt(1.0), x)
}),
];

fn explained(planted: Planted) -> Explanation {
    explain_planted(|x| named("bad", || planted(x)))
}

/// The planted operator and its part are named in every case.
#[test]
fn the_first_operator_forward_is_named() {
    let mut wrong = Vec::new();
    for (name, operators, planted) in FORWARD {
        let explanation = explained(*planted);
        let right = explanation.culprit.as_ref().is_some_and(|culprit| {
            operators.split('|').any(|operator| operator == culprit.operator)
                && culprit.path.as_deref() == Some("bad")
                && culprit.pass == Pass::Forward
        });
        if !right || explanation.cause != Cause::Values || explanation.gradients.is_empty() {
            wrong.push(format!("{name}: {explanation}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_first_operator_backward_is_named_by_its_forward_operator() {
    let mut wrong = Vec::new();
    for (name, forward, planted) in BACKWARD {
        let explanation = explained(*planted);
        let right = explanation.culprit.as_ref().is_some_and(|culprit| {
            culprit.forward_operator.as_deref() == Some(*forward)
                && culprit.path.as_deref() == Some("bad")
                && culprit.pass == Pass::Backward
        });
        if !right || explanation.cause != Cause::Values {
            wrong.push(format!("{name}: {explanation}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Parts without a name of their own are known by their parameters.
#[test]
fn a_module_is_known_by_its_parameters() {
    let model = Model::new();
    let x = batch() * 1e6;
    let explanation = explain(&model.vs, Kind::Half, 1.0, || model.loss(&x, |x| x.shallow_clone()));
    let culprit = explanation.culprit.as_ref().unwrap();
    // The input is cast for the first layer.
    assert_eq!(culprit.path.as_deref(), Some("layers.0"), "{explanation}");
    assert_eq!(culprit.dtype, "fp16");
    assert!(explanation.to_string().contains("use bf16"), "{explanation}");
}

#[test]
fn the_same_product_is_repeated_in_f32() {
    let explanation = explain_planted(|x| {
        let b = half(&all(x, 300.0)).unsqueeze(0);
        b.bmm(&b.transpose(1, 2)).sum(None) + x
    });
    let culprit = explanation.culprit.unwrap();
    assert_eq!(culprit.largest_in_f32, Some(360_000.0));
    assert_eq!(culprit.largest_inputs, [300.0, 300.0]);
    assert_eq!(culprit.values.positive_infinite, 4);
    assert_eq!(culprit.values.elements, 4);
}

#[test]
fn a_mask_is_no_culprit() {
    let mask = Tensor::from_slice(&[0.0, f64::NEG_INFINITY, 0.0, 0.0]).to_kind(Kind::Float);
    let explanation = explain_planted(|x| {
        let weights = (x + &mask).softmax(1, None);
        let filled = x.masked_fill(&x.gt(1.0), f64::NEG_INFINITY).softmax(1, None);
        named("bad", || (weights + filled) * 0.0 + 100).exp()
    });
    assert_eq!(explanation.culprit.unwrap().operator, "aten::exp");
}

/// A mask with -inf that is added to numbers which have overflowed, made before or inside of the iteration, or a buffer.
#[test]
fn an_overflow_beside_a_mask_is_the_culprit() {
    let (model, x) = Model::with_batch();
    let upper = Tensor::ones([2, 4], (Kind::Float, Device::Cpu)).triu(1).to_kind(Kind::Bool);
    let make = || upper.zeros_like().to_kind(Kind::Float).masked_fill(&upper, f64::NEG_INFINITY);
    let given = make();
    let mut buffer = model.vs.root().zeros_no_train("mask", &[2, 4]);
    tch::no_grad(|| buffer.copy_(&given));
    let masks: [&dyn Fn() -> Tensor; 4] = [
        &make,
        &|| given.shallow_clone(),
        &|| given.to_kind(Kind::Half).to_kind(Kind::Float),
        &|| buffer.shallow_clone(),
    ];
    for mask in masks {
        let loss = || {
            let mask = mask();
            let bad = |x: &Tensor| named("bad", || all(x, 100.0).exp());
            model.loss(&x, |x| (bad(x) + &mask).softmax(-1, None))
        };
        let explanation = explain(&model.vs, Kind::Float, 1.0, loss);
        let operator = explanation.culprit.as_ref().map(|culprit| culprit.operator.as_str());
        assert_eq!(operator, Some("aten::exp"), "{explanation}");
    }
}

#[test]
fn numbers_that_cannot_be_counted_are_passed_over() {
    let explanation = explain_planted(|x| {
        let _small = tch::no_grad(|| x.to_kind(Kind::Float8e4m3fn).to_kind(Kind::Float));
        named("bad", || all(x, 100.0).exp())
    });
    assert_eq!(explanation.culprit.unwrap().operator, "aten::exp");
}

#[test]
fn what_was_not_finite_before_is_said() {
    let (model, x) = Model::with_batch();
    let loss = |x: &Tensor| model.loss(x, Tensor::shallow_clone);
    let bad = &x * f64::NAN;
    let explanation = explain(&model.vs, Kind::Float, 1.0, || loss(&bad));
    let Cause::Input { operator, path, place, values } = &explanation.cause else {
        panic!("{explanation}");
    };
    assert_eq!((operator.as_str(), path.as_deref()), ("aten::addmm", Some("layers.0")));
    assert_eq!((*place, values.nan, values.elements), (1, 8, 8), "{explanation}");
    assert!(
        explanation.to_string().contains(" of aten::addmm in layers.0, NaN in 8 of 8"),
        "{explanation}"
    );

    let convolved = || loss(&x) + f64_conv(&bad, 1.0);
    let explanation = explain(&model.vs, Kind::Float, 1.0, convolved);
    assert!(
        matches!(explanation.cause, Cause::Input { values, .. } if values.elements == 8),
        "{explanation}"
    );

    let mut weight = model.vs.variables().remove("layers.1.weight").unwrap();
    let _same = tch::no_grad(|| weight.fill_diagonal_(f64::INFINITY, false));
    let explanation = explain(&model.vs, Kind::Float, 1.0, || loss(&x));
    let name = "layers.1.weight".to_owned();
    assert_eq!(explanation.cause, Cause::Parameter { name }, "{explanation}");
}

/// Only the scale is too large, in a half-precision part of the backward pass, or for the loss itself.
#[rstest]
#[case::backward(Kind::Half, 65536.0 * 16.0)]
#[case::for_the_loss(Kind::Float, 1e38)]
fn the_largest_finite_scale_is_right(#[case] kind: Kind, #[case] scale: f64) {
    let model = Model::new();
    let x = batch() * 100;
    let loss = || model.loss(&x, Tensor::shallow_clone);
    let explanation = explain(&model.vs, kind, scale, loss);
    let Cause::Scale { largest_finite } = explanation.cause else { panic!("{explanation}") };
    let finite = |scale| explain(&model.vs, kind, scale, loss).cause == Cause::Finite;
    assert!(finite(largest_finite), "{explanation}");
    assert!(!finite(largest_finite * 2.0), "{explanation}");
}

#[test]
fn a_finite_iteration_has_no_culprit() {
    let (model, x) = Model::with_batch();
    let loss = || model.loss(&x, Tensor::shallow_clone);
    let explanation = explain(&model.vs, Kind::BFloat16, 8.0, loss);
    assert_eq!(explanation.cause, Cause::Finite);
    assert_eq!(explanation.culprit, None);
}

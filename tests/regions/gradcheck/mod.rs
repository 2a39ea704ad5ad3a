//! The checks of derivatives that the crate offers.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};

use rstest::rstest;
use tch::{Device, Kind, Tensor, no_grad_guard};
use tch_amp::function::{Function, FunctionError};
use tch_amp::gradcheck::{GradCheck, gradcheck, gradgradcheck};
use tch_amp::{Error, Result, function};

use crate::function::for_each_leaf;
use testkit::functions::MyMm;
use testkit::tensors::{leaf, random_leaf};
use testkit::{assert_says, for_each_device};

fn matrix(device: Device, rows: i64, columns: i64) -> Tensor {
    Tensor::randn([rows, columns], (Kind::Double, device)).set_requires_grad(true)
}

/// The input and its derivative by backward of a mismatch.
fn mismatch<T: std::fmt::Debug>(checked: Result<T>) -> (usize, f64) {
    match checked {
        Err(Error::Function(FunctionError::GradientMismatch { input, analytic, .. })) => {
            (input, analytic)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn correct_derivatives_pass() {
    for_each_device(|device| {
        tch::manual_seed(3);
        let (a, b) = (matrix(device, 2, 3), matrix(device, 3, 4));
        gradcheck(|x| MyMm::default().apply(x), &[&a, &b]).unwrap();
        gradgradcheck(|x| MyMm::default().apply(x), &[&a, &b]).unwrap();
        // Also for plain operations, non-contiguous inputs, several outputs, and inputs that require no gradient.
        gradcheck(|x| x[0].f_softmax(1, Kind::Double), &[a.tr()]).unwrap();
        gradgradcheck(|x| x[0].f_tanh(), &[&b]).unwrap();
        let frozen = b.detach();
        let both = |x: &[&Tensor]| Ok::<_, tch::TchError>([x[0].f_mm(x[1])?, x[0].f_sin()?]);
        gradcheck(both, &[&a, &frozen]).unwrap();
        gradgradcheck(both, &[&a, &frozen]).unwrap();
        let number = Tensor::from(0.5).to_device(device).set_requires_grad(true);
        gradcheck(|x| x[0].f_sin(), &[number]).unwrap();
    });
}

#[test]
fn the_inputs_are_unchanged() {
    for_each_device(|device| {
        let a = matrix(device, 2, 2);
        let before = a.detach_copy();
        gradcheck(|x| x[0].f_exp(), &[&a]).unwrap();
        assert_eq!(a, before);
        assert!(!a.grad().defined());
    });
}

#[test]
fn only_one_element_changes_at_a_time() {
    for_each_leaf(&[1.0, 2.0, 3.0], |_, x| {
        let moved = Cell::new(0);
        let f = |inputs: &[&Tensor]| {
            let count = inputs[0].detach().ne_tensor(&x.detach()).sum(None).int64_value(&[]);
            assert!(count <= 1, "{count} elements have moved at once");
            moved.set(moved.get() + count);
            inputs[0].f_square()
        };
        gradcheck(f, &[&x]).unwrap();
        assert_eq!(moved.get(), 6, "each of three elements moves up and down");
    });
}

#[test]
fn the_grad_mode_is_restored_even_after_a_panic() {
    let records = || (leaf(&[1.0], Kind::Double, Device::Cpu) * 2.0).requires_grad();
    let x = leaf(&[1.0], Kind::Double, Device::Cpu);
    let check = |panics: bool| {
        let f = |x: &[&Tensor]| {
            if panics {
                resume_unwind(Box::new("a planted panic"));
            }
            x[0].f_square()
        };
        let check = catch_unwind(AssertUnwindSafe(|| gradcheck(f, &[&x])));
        assert_eq!(check.is_err(), panics);
    };
    for panics in [false, true] {
        check(panics);
        assert!(records());
        let _off = no_grad_guard();
        check(panics);
        assert!(!records());
    }
}

#[test]
fn a_wrong_derivative_is_named() {
    for_each_device(|device| {
        let wrong = function(
            |ctx, x| {
                ctx.save_for_backward(x);
                Ok(x[0] * x[1])
            },
            |ctx, g| {
                let [a, b] = ctx.saved_tensors()?;
                let sign =
                    leaf(&[1.0, 1.0, -1.0, 1.0], Kind::Double, a.device()).detach().view([2, 2]);
                Ok([&g[0] * b, &g[0] * a * sign])
            },
        );
        let a = leaf(&[1.0, 2.0, 3.0, 4.0], Kind::Double, device).detach();
        let a = a.view([2, 2]).set_requires_grad(true);
        let error = gradcheck(|x| wrong.apply(x), &[&a, &a]).unwrap_err();
        let Error::Function(FunctionError::GradientMismatch {
            input,
            ref input_index,
            output,
            ref output_index,
            analytic,
            numeric,
        }) = error
        else {
            panic!("{error}")
        };
        assert_eq!((input, input_index.as_slice()), (1, [1, 0].as_slice()));
        assert_eq!((output, output_index.as_slice()), (0, [1, 0].as_slice()));
        assert_eq!(analytic, -3.0);
        assert!((numeric - 3.0).abs() < 1e-6, "{numeric}");
        let text = error.to_string();
        let want = "output 0 [1, 0] with respect to input 1 [1, 0] is -3 by backward and ";
        assert!(text.contains(want), "{text}");
    });
}

#[test]
fn a_wrong_element_of_the_output_is_named_by_the_shape_of_the_output() {
    let wrong = function(
        |_, x| Ok(x[0].reshape([4])),
        |_, g| Ok((&g[0] * Tensor::from_slice(&[1.0, 1.0, 1.0, -1.0])).reshape([2, 2])),
    );
    let error = gradcheck(|x| wrong.apply(x), &[matrix(Device::Cpu, 2, 2)]).unwrap_err();
    let Error::Function(FunctionError::GradientMismatch { input_index, output_index, .. }) = error
    else {
        panic!("{error}")
    };
    assert_eq!((input_index, output_index), (vec![1, 1], vec![3]));
}

#[test]
fn gradgradcheck_checks_the_derivative_with_respect_to_the_incoming_gradient() {
    // Its first derivative is right, and the second with respect to x; the one with respect to the gradient is cut off.
    let cut = function(
        |ctx, x| {
            ctx.save_for_backward(x);
            Ok(x[0].square())
        },
        |ctx, g| {
            let [x] = ctx.saved_tensors()?;
            Ok(g[0].detach() * x * 2.0)
        },
    );
    let x = leaf(&[1.0, 2.0], Kind::Double, Device::Cpu);
    gradcheck(|x| cut.apply(x), &[&x]).unwrap();
    assert_eq!(mismatch(gradgradcheck(|x| cut.apply(x), &[&x])), (1, 0.0));
}

#[test]
fn a_wrong_second_derivative_is_found() {
    for_each_leaf(&[1.0, 2.0], |_, x| {
        // The backward hides x from autograd: the first derivative is correct, but the second is 0.
        let hidden = function(
            |ctx, x| {
                ctx.save_value(x[0].detach());
                Ok(x[0].square())
            },
            |ctx, g| Ok(&g[0] * ctx.saved_value::<Tensor>()? * 2.0),
        );
        gradcheck(|x| hidden.apply(x), &[&x]).unwrap();
        assert_eq!(mismatch(gradgradcheck(|x| hidden.apply(x), &[&x])), (0, 0.0));
        let once = hidden.once_differentiable();
        assert_says(gradgradcheck(|x| once.apply(x), &[&x]), "once differentiable");
        // Also that of a later output, whose first one has a gradient, or none.
        for first in [|x: &Tensor| x.f_sin(), |x: &Tensor| x.detach().f_sin()] {
            let f = |x: &[&Tensor]| Ok::<_, Error>([first(x[0])?, hidden.apply(x)?]);
            gradcheck(f, &[&x]).unwrap();
            let _found = mismatch(gradgradcheck(f, &[&x]));
        }
    });
}

#[test]
fn a_dependence_that_backward_omits_is_found() {
    for_each_leaf(&[1.0], |_, x| {
        let constant = function(|_, x| Ok(x[0] * 2.0), |_, _| Ok(None));
        assert_eq!(mismatch(gradcheck(|x| constant.apply(x), &[&x])).1, 0.0);
        // An output that does not require a gradient must not depend on the input.
        assert_eq!(mismatch(gradcheck(|x| x[0].detach().f_exp(), &[&x])).1, 0.0);
    });
}

#[test]
fn non_differentiable_outputs_are_not_compared() {
    for_each_leaf(&[1.0, 2.0], |_, x| {
        let with_norm = function(
            |ctx, x| {
                let norm = x[0].norm();
                ctx.mark_non_differentiable(&[&norm]);
                Ok([x[0] * 2.0, norm, x[0].argmax(0, false), Tensor::new()])
            },
            |_, g| Ok(&g[0] * 2.0),
        );
        gradcheck(|x| with_norm.apply(x), &[&x]).unwrap();
        gradgradcheck(|x| with_norm.apply(x), &[&x]).unwrap();
    });
}

#[test]
fn empty_inputs_and_outputs_pass() {
    for_each_leaf(&[1.0], |_, x| {
        let empty = x.narrow(0, 0, 0).detach().set_requires_grad(true);
        gradcheck(|x| x[0].f_exp(), &[&empty]).unwrap();
        gradgradcheck(|x| x[0].f_exp(), &[&empty]).unwrap();
        let both = |x: &[&Tensor]| Ok::<_, tch::TchError>([x[0].f_exp()?, x[1].f_exp()?]);
        gradcheck(both, &[&empty, &x]).unwrap();
    });
}

#[test]
fn nan_is_never_close() {
    for_each_leaf(&[1.0], |_, x| {
        let nan = function(|_, x| Ok(x[0] * 2.0), |_, g| Ok(&g[0] * f64::NAN));
        assert!(mismatch(gradcheck(|x| nan.apply(x), &[&x])).1.is_nan());
    });
}

#[test]
fn the_callers_tolerances_are_used() {
    for_each_leaf(&[1.0], |_, x| {
        let off = function(|_, x| Ok(x[0] * 2.0), |_, g| Ok(&g[0] * 2.01));
        let passes = |check: GradCheck| check.gradcheck(|x| off.apply(x), &[&x]).is_ok();
        assert!(!passes(GradCheck::default()));
        assert!(passes(GradCheck { rtol: 0.01, ..Default::default() }));
        assert!(passes(GradCheck { atol: 0.011, ..Default::default() }));
        assert!(!passes(GradCheck { eps: 1e-3, ..Default::default() }));
    });
}

#[rstest]
#[case(5.0, 10.0, false)]
#[case(10.0, 5.0, true)]
#[case(-5.0, -10.0, false)]
#[case(-10.0, -5.0, true)]
fn the_relative_tolerance_is_relative_to_the_numeric_gradient(
    #[case] numeric: f64,
    #[case] analytic: f64,
    #[case] passes: bool,
) {
    for_each_leaf(&[1.0], |_, x| {
        let off = function(move |_, x| Ok(x[0] * numeric), move |_, g| Ok(&g[0] * analytic));
        let check = GradCheck { rtol: 0.6, ..Default::default() };
        let checked = check.gradcheck(|x| off.apply(x), &[&x]);
        assert_eq!(checked.is_ok(), passes, "{checked:?}");
    });
}

#[test]
fn tolerances_outside_of_their_ranges_are_refused() {
    let x = [leaf(&[1.0], Kind::Double, Device::Cpu)];
    let refused = |check: GradCheck, field: &str| {
        let never = |_: &[&Tensor]| -> Result<Tensor> { panic!("it must not run") };
        for checked in [check.gradcheck(never, &x), check.gradgradcheck(never, &x)] {
            let is_named =
                matches!(checked, Err(Error::InvalidArgument { name, .. }) if name == field);
            assert!(is_named, "{checked:?}");
        }
    };
    let default = GradCheck::default;
    for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1e-9] {
        refused(GradCheck { eps: value, ..default() }, "eps");
        refused(GradCheck { atol: value, ..default() }, "atol");
        refused(GradCheck { rtol: value, ..default() }, "rtol");
    }
    refused(GradCheck { eps: 0.0, ..default() }, "eps");
    let exact = GradCheck { eps: 0.5, atol: 0.0, rtol: 0.0 };
    exact.gradcheck(|x| x[0].f_mul_scalar(2.0), &x).unwrap();
}

#[test]
fn inputs_that_cannot_be_checked_are_refused() {
    for_each_leaf(&[1.0], |device, x| {
        let single = random_leaf(device, Kind::Float, &[1]);
        assert_says(
            gradcheck(|x| x[0].f_exp(), &[single]),
            "cannot check the gradient: input 0 is Float; finite differences need f64",
        );
        let constant = gradcheck(|x| x[0].f_exp(), &[x.detach()]);
        assert_says(constant, "none of the inputs requires one");
        let to_single = gradcheck(|x| x[0].f_to_kind(Kind::Float), &[x]);
        assert_says(to_single, "output 0 is Float");
    });
}

#[test]
fn a_nondeterministic_backward_is_found() {
    for_each_leaf(&[1.0], |_, x| {
        static CALLS: AtomicUsize = AtomicUsize::new(0);
        CALLS.store(0, Ordering::SeqCst);
        let fickle = function(
            |_, x| Ok(x[0] * 2.0),
            |_, g| {
                let call = CALLS.fetch_add(1, Ordering::SeqCst);
                Ok(&g[0] * (2.0 + 1e-9 * call as f64))
            },
        );
        let error = gradcheck(|x| fickle.apply(x), &[x]).unwrap_err();
        assert_eq!(CALLS.load(Ordering::SeqCst), 2, "the first two results already differ");
        let Error::Function(FunctionError::NondeterministicBackward { output: 0 }) = error else {
            panic!("{error}")
        };
        assert!(error.to_string().contains("is nondeterministic"), "{error}");
    });
}

#[test]
fn errors_of_the_function_are_returned() {
    for_each_leaf(&[1.0], |_, x| {
        assert_says(gradcheck(|x| x[0].f_reshape([7]), &[&x]), "shape '[7]'");
        let refused = function(
            |_, x| Ok(x[0] * 2.0),
            |_, g| Ok([g[0].shallow_clone(), g[0].shallow_clone()]),
        );
        let error = gradcheck(|x| refused.apply(x), &[x]).unwrap_err();
        assert!(matches!(error, Error::Function(FunctionError::Misuse { .. })), "{error}");
    });
}

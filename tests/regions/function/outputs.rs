//! The outputs of a function, and how they take part in autograd.

use tch::{Kind, Tensor, no_grad};
use tch_amp::function::Function;

use crate::function::{MyMm, apply, for_each_leaf, message, random_leaf, square, to_f64};
use testkit::bits::bits;
use testkit::for_each_device;
use testkit::tensors::leaf;

#[test]
fn a_function_computes_the_same_as_the_operation() {
    for_each_device(|device| {
        for kind in [Kind::Float, Kind::Double, Kind::BFloat16] {
            let [a, b] = [random_leaf(device, kind, &[3, 4]), random_leaf(device, kind, &[4, 2])];
            let [c, d] = [&a, &b].map(|t| t.detach().set_requires_grad(true));
            let (ours, builtin) = (MyMm::default().apply(&[&a, &b]).unwrap(), c.mm(&d));
            assert_eq!(bits(&ours), bits(&builtin));
            ours.square().sum(None).backward();
            builtin.square().sum(None).backward();
            assert_eq!(bits(&a.grad()), bits(&c.grad()), "{device:?} {kind:?}");
            assert_eq!(bits(&b.grad()), bits(&d.grad()), "{device:?} {kind:?}");
        }
    });
}

#[test]
fn several_outputs_have_a_gradient_each_and_zeros_stand_for_a_missing_one() {
    for_each_leaf(&[1.0, 2.0], |_, x| {
        let [double, triple] = apply(
            &[&x],
            |_, x| Ok([x[0] * 2.0, x[0] * 3.0]),
            |_, grads| {
                assert_eq!(grads.iter().len(), 2);
                Ok(&grads[0] * 2.0 + &grads[1] * 3.0)
            },
        )
        .unwrap();
        let only = Tensor::run_backward(&[triple.sum(None)], &[&x], true, false);
        assert_eq!(to_f64(&only[0]), [3.0, 3.0]);
        (double.sum(None) * 10.0).backward();
        assert_eq!(to_f64(&x.grad()), [20.0, 20.0]);
    });
}

#[test]
fn a_list_of_outputs_may_have_any_length() {
    for_each_device(|device| {
        for count in 0..4 {
            let x = leaf(&[1.0], Kind::Double, device);
            let out: Vec<Tensor> = apply(
                &[&x],
                move |_, x| Ok((0..count).map(|i| x[0] * f64::from(i)).collect::<Vec<_>>()),
                |_, grads| {
                    let weighted =
                        grads.iter().enumerate().map(|(i, grad)| grad.unwrap() * i as f64);
                    Ok(weighted.sum::<Tensor>())
                },
            )
            .unwrap();
            assert_eq!(out.len(), usize::try_from(count).unwrap());
            if count > 1 {
                Tensor::cat(&out, 0).sum(None).backward();
                assert_eq!(to_f64(&x.grad()), [f64::from((0..count).sum::<i32>())]);
            }
        }
    });
}

#[test]
fn an_input_that_is_returned_becomes_a_view() {
    for_each_leaf(&[1.0, 2.0], |_, x| {
        let y = apply(&[&x], |_, x| Ok(x[0].shallow_clone()), |_, g| Ok(&g[0] * 5.0)).unwrap();
        assert_eq!(y.data_ptr(), x.data_ptr());
        assert!(x.is_leaf() && !y.is_leaf());
        y.sum(None).backward();
        assert_eq!(to_f64(&x.grad()), [5.0, 5.0]);
    });
}

#[test]
fn a_view_that_is_returned_cannot_be_changed_in_place() {
    for_each_leaf(&[1.0, 2.0], |_, x| {
        let refused = |of: fn(&Tensor) -> Tensor| {
            let mut y = apply(&[&(&x * 1.0)], move |_, x| Ok(of(x[0])), |_, _| Ok(None)).unwrap();
            let error = message(y.f_mul_(&Tensor::from(2.0)).map(drop));
            assert!(error.contains("is a view") && error.contains("custom"), "{error}");
        };
        refused(|x| x.narrow(0, 1, 1));
        // The same holds for a view of a tensor that forward created, which has no history.
        refused(|x| (x * 2.0).narrow(0, 1, 1));
        refused(|x| x.detach().narrow(0, 1, 1));
    });
}

#[test]
fn an_output_may_be_changed_in_place() {
    for_each_leaf(&[1.0, 2.0], |_, x| {
        let mut y = apply(&[&x], |_, x| Ok(x[0] * 2.0), |_, g| Ok(&g[0] * 2.0)).unwrap();
        y *= 3.0;
        y.sum(None).backward();
        assert_eq!(to_f64(&x.grad()), [6.0, 6.0]);
    });
}

#[test]
fn an_output_that_is_returned_twice_is_two_outputs() {
    for_each_leaf(&[1.0], |_, x| {
        let [a, b] = apply(
            &[&x],
            |_, x| {
                let y = x[0] * 2.0;
                Ok([y.shallow_clone(), y])
            },
            |_, grads| Ok(&grads[0] * 100.0 + &grads[1]),
        )
        .unwrap();
        (a * 2.0 + b * 3.0).backward();
        assert_eq!(to_f64(&x.grad()), [203.0]);
    });
}

#[test]
fn integer_outputs_are_not_differentiable() {
    for_each_leaf(&[1.0, 3.0], |_, x| {
        let [double, index] = apply(
            &[&x],
            |_, x| Ok([x[0] * 2.0, x[0].argmax(0, false)]),
            |_, grads| {
                assert_eq!(grads[1].kind(), Kind::Int64, "zeros of the output's dtype");
                Ok(&grads[0] * 2.0)
            },
        )
        .unwrap();
        assert!(double.requires_grad() && !index.requires_grad());
        assert_eq!(index.int64_value(&[]), 1);
        double.sum(None).backward();
        assert_eq!(to_f64(&x.grad()), [2.0, 2.0]);
    });
}

#[test]
fn an_undefined_output_stays_undefined() {
    for_each_leaf(&[1.0], |_, x| {
        let [none, some] = apply(
            &[&x],
            |_, x| Ok([Tensor::new(), x[0] * 2.0]),
            |_, grads| {
                assert!(grads.get(0).is_none());
                Ok(&grads[1] * 2.0)
            },
        )
        .unwrap();
        assert!(!none.defined());
        some.backward();
        assert_eq!(to_f64(&x.grad()), [2.0]);
    });
}

#[test]
fn returning_a_captured_tensor_leaves_its_history_unchanged() {
    for_each_device(|device| {
        let constant = leaf(&[7.0], Kind::Double, device);
        let mine = constant.shallow_clone();
        let x = leaf(&[1.0], Kind::Double, device);
        let y = apply(&[&x], move |_, _| Ok(mine.shallow_clone()), |_, g| Ok(&g[0] * 4.0)).unwrap();
        assert!(constant.is_leaf(), "the caller's tensor does not become an output");
        y.backward();
        assert_eq!(to_f64(&x.grad()), [4.0]);
        assert!(!constant.grad().defined());
    });
}

#[test]
fn nothing_is_recorded_if_no_gradient_is_needed() {
    for_each_leaf(&[1.0], |_, x| {
        let double = tch_amp::function(
            |ctx, x| {
                assert!(!ctx.needs_input_grad(0)?);
                ctx.save_for_backward(x);
                Ok(x[0] * 2.0)
            },
            |_, g| Ok(&g[0] * 2.0),
        );
        let outputs = [no_grad(|| double.apply(&[&x])), double.apply(&[x.detach()])];
        for y in outputs {
            let y = y.unwrap();
            assert!(!y.requires_grad());
            assert_eq!(to_f64(&y), [2.0]);
        }
    });
}

#[test]
fn a_function_may_apply_another_one() {
    for_each_leaf(&[3.0], |_, x| {
        // The outer function hides the inner one, whose forward runs without a graph, and computes the derivative
        // itself.
        let y = apply(
            &[&x],
            move |ctx, x| {
                ctx.save_for_backward(x);
                let inner = square(x[0])?;
                assert!(!inner.requires_grad());
                Ok(square(&inner)?)
            },
            move |ctx, g| {
                let [x] = ctx.saved_tensors()?;
                Ok(square(&x)? * x * 4.0 * &g[0])
            },
        )
        .unwrap();
        assert_eq!(to_f64(&y), [81.0]);
        y.backward();
        assert_eq!(to_f64(&x.grad()), [108.0]);
    });
}

//! Higher derivatives.

use tch::{Kind, Tensor};
use tch_amp::function;

use crate::function::{for_each_leaf, square, to_f64};
use testkit::assert_says;
use testkit::tensors::leaf;

/// The gradient of `y` with respect to `x`, which can itself be differentiated.
fn gradient(y: &Tensor, x: &Tensor) -> Tensor {
    Tensor::run_backward(&[y.sum(None)], &[x], true, true).remove(0)
}

#[test]
fn third_derivatives_are_correct() {
    for_each_leaf(&[2.0], |_, x| {
        let cube = function(
            |ctx, x| {
                ctx.save_for_backward(x);
                Ok(x[0].pow_tensor_scalar(3))
            },
            |ctx, g| {
                let [x] = ctx.saved_tensors()?;
                Ok(x.square() * 3.0 * &g[0])
            },
        );
        let first = gradient(&cube.apply(&[&x]).unwrap(), &x);
        let second = gradient(&first, &x);
        let third = gradient(&second, &x);
        assert_eq!([&first, &second, &third].map(|t| to_f64(t)[0]), [12.0, 12.0, 6.0]);
    });
}

#[test]
fn a_saved_output_keeps_its_history() {
    for_each_leaf(&[0.5], |_, x| {
        // Also an output of which forward keeps another copy, so that the caller gets a tensor of its own.
        for held in [false, true] {
            let exp = function(
                move |ctx, x| {
                    let y = x[0].exp();
                    ctx.save_for_backward(&[&y]);
                    if held {
                        ctx.save_value(y.shallow_clone());
                    }
                    Ok(y)
                },
                |ctx, g| {
                    let [y] = ctx.saved_tensors()?;
                    Ok(y * &g[0])
                },
            );
            let first = gradient(&exp.apply(&[&x]).unwrap(), &x);
            assert_eq!(to_f64(&gradient(&first, &x)), [0.5f64.exp()]);
        }
    });
}

/// x², whose second derivative is refused.
fn once_square(x: &Tensor) -> Tensor {
    let square = function(
        |ctx, x| {
            ctx.save_for_backward(x);
            Ok(x[0].square())
        },
        |ctx, g| {
            let [x] = ctx.saved_tensors()?;
            Ok(x * 2.0 * &g[0])
        },
    );
    square.name("Square").once_differentiable().apply(&[x]).unwrap()
}

#[test]
fn a_once_differentiable_function_refuses_its_second_derivative() {
    for_each_leaf(&[3.0], |device, x| {
        let first = gradient(&once_square(&x), &x);
        assert_eq!(to_f64(&first), [6.0]);
        assert_says(first.f_backward(), "Square is once differentiable");
        // The same in a sum with parts that can be differentiated: no part is silently left out.
        assert_says(
            (gradient(&once_square(&x), &x) + x.square()).f_backward(),
            "Square is once differentiable",
        );
        assert_eq!(to_f64(&gradient(&gradient(&square(&x).unwrap(), &x), &x)), [2.0]);
        // The gradient also depends on the incoming gradient, and cannot be differentiated with respect to that either.
        let weight = leaf(&[5.0], Kind::Double, device);
        let first = gradient(&(once_square(&x) * &weight), &x);
        assert_eq!(to_f64(&first), [30.0]);
        let second = Tensor::f_run_backward(&[first.sum(None)], &[&weight], true, false);
        assert_says(second.map(drop), "Square is once differentiable");
    });
}

#[test]
fn a_once_differentiable_function_has_first_derivatives() {
    for_each_leaf(&[3.0], |_, x| {
        once_square(&x).backward();
        assert_eq!(to_f64(&x.grad()), [6.0]);
        assert!(!x.grad().requires_grad());
    });
}

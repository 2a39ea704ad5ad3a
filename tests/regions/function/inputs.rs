//! The inputs of a function.

use tch::{Device, Kind, Tensor};
use tch_amp::Error;
use tch_amp::function::FunctionError;

use crate::function::{apply, for_each_leaf, to_f64};
use testkit::tensors::leaf;

#[test]
fn a_function_owns_its_state() {
    for_each_leaf(&[1.0, 2.0], |_, x| {
        let (factor, name) = (3.0, String::from("any value that is Send"));
        let y = apply(
            &[&x],
            move |_, x| Ok(x[0] * factor),
            move |_, g| {
                assert_eq!(name.len(), 22);
                Ok(&g[0] * factor)
            },
        );
        y.unwrap().sum(None).backward();
        assert_eq!(to_f64(&x.grad()), [3.0, 3.0]);
    });
}

#[test]
fn undefined_inputs_are_allowed_anywhere() {
    for_each_leaf(&[1.0, 2.0], |_, x| {
        let none = Tensor::new();
        for inputs in [[&none, &x, &none], [&x, &none, &none], [&none, &none, &x]] {
            let place = inputs.iter().position(|t| t.defined()).unwrap();
            let y = apply(
                &inputs,
                move |ctx, x| {
                    ctx.save_for_backward(x);
                    assert_eq!(x.iter().position(|t| t.defined()), Some(place));
                    let next = (place + 1) % 3;
                    assert!(ctx.needs_input_grad(place)? && !ctx.needs_input_grad(next)?);
                    Ok(x[place] * 2.0)
                },
                move |ctx, g| {
                    let saved: [Tensor; 3] = ctx.saved_tensors()?;
                    assert_eq!(saved.iter().position(Tensor::defined), Some(place));
                    assert!(ctx.needs_input_grad(place)?);
                    assert!(!ctx.needs_input_grad((place + 1) % 3)?);
                    let mut grads = [None, None, None];
                    grads[place] = Some(&g[0] * 2.0);
                    Ok(grads)
                },
            );
            let (mut x, y) = (x.shallow_clone(), y.unwrap());
            x.zero_grad();
            y.sum(None).backward();
            assert_eq!(to_f64(&x.grad()), [2.0, 2.0]);
        }
    });
}

#[test]
fn a_function_without_inputs_is_not_recorded() {
    let none: [Tensor; 0] = [];
    let one = || Tensor::ones([1], (Kind::Float, Device::Cpu));
    let y = tch_amp::function(move |_, _| Ok(one()), |_, _| Ok(Vec::<Tensor>::new())).apply(&none);
    assert!(!y.unwrap().requires_grad());
}

#[test]
fn one_tensor_may_be_several_inputs() {
    for_each_leaf(&[3.0], |_, x| {
        let y = apply(
            &[&x, &x],
            |ctx, x| {
                ctx.save_for_backward(x);
                Ok(x[0] * x[1])
            },
            |ctx, g| {
                let [a, b] = ctx.saved_tensors()?;
                Ok([&g[0] * b, &g[0] * a])
            },
        );
        y.unwrap().backward();
        assert_eq!(to_f64(&x.grad()), [6.0]);
    });
}

#[test]
fn a_missing_gradient_is_none() {
    for_each_leaf(&[1.0], |device, x| {
        let y = leaf(&[1.0], Kind::Double, device);
        let z =
            apply(&[&x, &y], |_, x| Ok(x[0] + x[1]), |_, g| Ok([Some(g[0].shallow_clone()), None]));
        z.unwrap().backward();
        assert_eq!(to_f64(&x.grad()), [1.0]);
        assert!(!y.grad().defined());
    });
}

#[test]
fn a_gradient_is_cast_and_reduced_to_its_input() {
    let x = Tensor::ones([2, 1], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let y = apply(
        &[&x],
        |_, x| Ok(x[0] * 2.0),
        |_, g| Ok(g[0].expand([2, 3], true).to_kind(Kind::BFloat16)),
    );
    y.unwrap().sum(None).backward();
    assert_eq!((x.grad().kind(), x.grad().size()), (Kind::Float, vec![2, 1]));
    assert_eq!(to_f64(&x.grad()), [3.0, 3.0]);
}

fn no_such_input(answer: tch_amp::Result<bool>) {
    let error = answer.unwrap_err();
    assert!(
        matches!(error, Error::Function(FunctionError::NoSuchInput { input: 3, inputs: 3 })),
        "{error}"
    );
    assert_eq!(error.to_string(), "there is no input 3: the function was given 3");
}

#[test]
fn backward_can_query_which_gradients_are_needed() {
    for_each_leaf(&[1.0], |device, x| {
        let (y, z) = (leaf(&[1.0], Kind::Double, device), x.detach());
        let needs = |wanted: &[&Tensor]| {
            let (send, receive) = std::sync::mpsc::channel();
            let out = apply(
                &[&x, &y, &z],
                |ctx, x| {
                    let needs = [0, 1, 2].map(|i| ctx.needs_input_grad(i).unwrap());
                    assert_eq!(needs, [true, true, false]);
                    no_such_input(ctx.needs_input_grad(3));
                    Ok(x[0] + x[1] + x[2])
                },
                move |ctx, g| {
                    let needs = [0, 1, 2].map(|i| ctx.needs_input_grad(i).unwrap());
                    no_such_input(ctx.needs_input_grad(3));
                    send.send(needs)?;
                    Ok([0, 1, 2].map(|i| needs[i].then(|| g[0].shallow_clone())))
                },
            );
            Tensor::f_run_backward(&[out.unwrap()], wanted, false, false).unwrap();
            receive.recv().unwrap()
        };
        assert_eq!(needs(&[&x]), [true, false, false]);
        assert_eq!(needs(&[&y]), [false, true, false]);
        assert_eq!(needs(&[&x, &y]), [true, true, false]);
    });
}

//! Custom functions and the checks of their derivatives.

use tch::{Kind, Tensor};
use tch_amp::function;
use tch_amp::function::{GradConfig, grad};
use tch_amp::gradcheck::{gradcheck, gradgradcheck};
use tch_amp::lean::{LinearCrossEntropyConfig, linear_cross_entropy};

use crate::tensors::with_each_kind;

#[test]
fn inputs_and_outputs() {
    let taken = with_each_kind("a function's input", |tensor| {
        let doubled = function(
            |ctx, x| {
                ctx.save_for_backward(x);
                Ok(x[0].f_add(x[0])?)
            },
            |ctx, g| {
                let [_saved] = ctx.saved_tensors()?;
                Ok([Some(g[0].f_add(&g[0])?)])
            },
        );
        let output = doubled.apply(&[&tensor])?;
        if output.requires_grad() {
            output.f_sum(output.f_kind()?)?.f_backward()?;
        }
        Ok(())
    });
    taken.includes(&["f32", "bf16", "with gaps", "a leaf", "recorded"]);
    with_each_kind("a function's output", |tensor| {
        let input = Tensor::from_slice(&[1f32, 2.0]).set_requires_grad(true);
        let given = tensor.shallow_clone();
        let made = function(
            move |_, _| Ok(given.shallow_clone()),
            |_, g| Ok([Some(g[0].f_sum(Kind::Float)?.f_expand([2], false)?)]),
        );
        let output = made.apply(&[&input])?;
        if output.defined() && output.requires_grad() {
            output.f_sum(output.f_kind()?)?.f_backward()?;
        }
        Ok(())
    });
    with_each_kind("a gradient that a backward returns", |tensor| {
        let input = Tensor::from_slice(&[1f32, 2.0]).set_requires_grad(true);
        let given = tensor.shallow_clone();
        let made =
            function(|_, x| Ok(x[0].f_add(x[0])?), move |_, _| Ok([Some(given.shallow_clone())]));
        made.apply(&[&input])?.f_sum(Kind::Float)?.f_backward()?;
        Ok(())
    });
}

#[test]
fn outputs_inputs_and_gradients_of_grad() {
    let config = GradConfig::default();
    let x = Tensor::from_slice(&[1f32, 2.0]).set_requires_grad(true);
    with_each_kind("an output of grad", |tensor| grad(&[tensor], &[&x], &config).map(drop));
    with_each_kind("an input of grad", |tensor| {
        let y = x.f_sum(Kind::Float)?;
        let config = GradConfig { allow_unused: true, ..config };
        grad(&[y], &[tensor], &config).map(drop)
    });
    with_each_kind("a tensor of which grad computes", |tensor| {
        let ones = tensor.f_detach()?.f_ones_like()?;
        grad(&[&tensor], &[&tensor], &GradConfig { grad_outputs: &[Some(&ones)], ..config })?;
        Ok(())
    });
    let taken = with_each_kind("a gradient that grad is given", |tensor| {
        let y = x.f_add(&x)?;
        grad(&[y], &[&x], &GradConfig { grad_outputs: &[Some(&tensor)], ..config }).map(drop)
    });
    println!("grad takes {:?} as gradients", taken.kinds);
    assert!(!x.grad().defined());
}

#[test]
fn inputs_of_gradcheck() {
    with_each_kind("gradcheck", |tensor| gradcheck(|x| x[0].f_add(x[0]), &[tensor]).map(drop));
}

#[test]
fn marks_and_saved_tensors() {
    with_each_kind("a tensor that is marked", |tensor| {
        for mark in 0..3 {
            let given = tensor.shallow_clone();
            let input = Tensor::from_slice(&[1f32, 2.0]).set_requires_grad(true);
            let made = function(
                move |ctx, x| {
                    match mark {
                        0 => ctx.mark_dirty(&[&given]),
                        1 => ctx.mark_non_differentiable(&[&given]),
                        _ => ctx.save_for_backward(&[&given]),
                    }
                    Ok(x[0].f_add(x[0])?)
                },
                |ctx, g| {
                    let _saved = ctx.saved_tensors_vec()?;
                    Ok([Some(g[0].f_add(&g[0])?)])
                },
            );
            if let Ok(output) = made.apply(&[&input]) {
                output.f_sum(Kind::Float)?.f_backward()?;
            }
        }
        Ok(())
    });
}

#[test]
fn inputs_of_gradgradcheck() {
    with_each_kind("gradgradcheck", |tensor| {
        gradgradcheck(|x| x[0].f_add(x[0]), &[tensor]).map(drop)
    });
}

#[test]
fn operands_of_a_loss_that_keeps_less() {
    let config = LinearCrossEntropyConfig::default;
    let [hidden, weight] =
        [[2i64, 3], [4, 3]].map(|size| Tensor::ones(size, (Kind::Float, tch::Device::Cpu)));
    let targets = Tensor::from_slice(&[0i64, 3]);
    let with =
        |hidden: &Tensor, weight: &Tensor, targets: &Tensor, config: LinearCrossEntropyConfig| {
            let loss = linear_cross_entropy(hidden, weight, None, targets, &config)?;
            if loss.requires_grad() {
                loss.f_backward()?;
            }
            Ok(())
        };
    with_each_kind("hidden of a loss", |tensor| with(&tensor, &weight, &targets, config()));
    with_each_kind("weight of a loss", |tensor| with(&hidden, &tensor, &targets, config()));
    with_each_kind("targets of a loss", |tensor| with(&hidden, &weight, &tensor, config()));
    with_each_kind("class weights of a loss", |tensor| {
        let config = LinearCrossEntropyConfig { class_weights: Some(tensor), ..config() };
        with(&hidden, &weight, &targets, config)
    });
}

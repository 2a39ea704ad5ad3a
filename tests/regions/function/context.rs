//! What a forward passes to autograd and to its backward.

use tch::{Kind, Tensor, no_grad};
use tch_amp::Error;
use tch_amp::function::{ForwardContext, FunctionError};

use crate::function::{apply, double_, for_each_leaf, square, to_f64};
use testkit::tensors::leaf;
use testkit::{assert_says, for_each_device};

#[test]
fn inputs_outputs_and_other_tensors_can_be_saved() {
    for_each_leaf(&[0.5, 1.0], |_, x| {
        let y = apply(
            &[&x],
            |ctx, x| {
                let y = x[0].exp();
                let other = x[0] * 10.0;
                ctx.save_for_backward(&[x[0], &y, &other, &Tensor::new()]);
                Ok(y)
            },
            |ctx, g| {
                let [x, y, other, none] = ctx.saved_tensors()?;
                assert!(x.is_leaf() && x.requires_grad(), "the input itself");
                assert!(!y.is_leaf() && y.requires_grad(), "the output with its history");
                assert!(!other.requires_grad() && !none.defined());
                assert_eq!(ctx.saved_tensors_vec()?.len(), 4);
                assert_eq!(
                    ctx.saved_tensors::<3>().unwrap_err().to_string(),
                    "backward asked for 3 tensors, but forward saved 4"
                );
                Ok(&g[0] * y)
            },
        )
        .unwrap();
        y.sum(None).backward();
        assert_eq!(to_f64(&x.grad()), to_f64(&y));
    });
}

#[test]
fn a_later_list_replaces_an_earlier_one() {
    for_each_leaf(&[2.0], |_, x| {
        let y = apply(
            &[&x],
            |ctx, x| {
                ctx.save_for_backward(&[x[0], x[0]]);
                ctx.save_for_backward(&[x[0]]);
                ctx.save_value(1u8);
                ctx.save_value(2u8);
                Ok(x[0] * 1.0)
            },
            |ctx, g| {
                let [x] = ctx.saved_tensors()?;
                assert_eq!(*ctx.saved_value::<u8>()?, 2);
                Ok(&g[0] * x)
            },
        );
        y.unwrap().backward();
        assert_eq!(to_f64(&x.grad()), [2.0]);
    });
}

#[test]
fn values_of_any_type_can_be_saved() {
    for_each_leaf(&[2.0], |_, x| {
        let y = apply(
            &[&x],
            |ctx, x| {
                ctx.save_value(String::from("text"));
                ctx.save_value((3.0, vec![1, 2]));
                Ok(x[0] * 3.0)
            },
            |ctx, g| {
                assert_eq!(ctx.saved_value::<String>()?, "text");
                let missing = ctx.saved_value::<u64>().unwrap_err().to_string();
                let want =
                    "backward asked for a value of type u64, but forward saved none of that type";
                assert_eq!(missing, want);
                let (factor, list) = ctx.saved_value::<(f64, Vec<i32>)>()?;
                assert_eq!(list, &[1, 2]);
                Ok(&g[0] * *factor)
            },
        );
        y.unwrap().backward();
        assert_eq!(to_f64(&x.grad()), [3.0]);
    });
}

#[test]
fn a_saved_tensor_that_was_changed_in_place_is_refused() {
    for_each_leaf(&[2.0], |_, x| {
        let mut z = &x * 1.0;
        let y = square(&z).unwrap();
        z += 1.0;
        assert_says(y.f_backward(), "modified by an inplace operation");

        let mut out = apply(
            &[&x],
            |ctx, x| {
                let y = x[0].exp();
                ctx.save_for_backward(&[&y]);
                Ok(y)
            },
            |ctx, g| {
                let [y] = ctx.saved_tensors()?;
                Ok(&g[0] * y)
            },
        )
        .unwrap();
        out += 1.0;
        assert_says(out.f_backward(), "modified by an inplace operation");
    });
}

#[test]
fn a_second_backward_needs_a_kept_graph() {
    for_each_leaf(&[2.0], |_, x| {
        let y = square(&x).unwrap();
        Tensor::f_run_backward(&[&y], &[&x], true, false).unwrap();
        y.backward();
        assert_says(y.f_backward(), "backward through the graph a second time");
        assert_eq!(to_f64(&x.grad()), [4.0]);
    });
}

#[test]
fn saved_values_are_freed_like_saved_tensors() {
    for_each_leaf(&[2.0], |_, x| {
        let y = apply(
            &[&x],
            |ctx, x| {
                ctx.save_value(2.0f64);
                Ok(x[0] * 2.0)
            },
            |ctx, g| Ok(&g[0] * *ctx.saved_value::<f64>()?),
        )
        .unwrap();
        y.backward();
        assert_says(y.f_backward(), "backward through the graph a second time");
    });
}

#[test]
fn a_function_that_saves_nothing_can_run_backward_again() {
    for_each_leaf(&[2.0], |_, x| {
        let y = apply(&[&x], |_, x| Ok(x[0] * 2.0), |_, g| Ok(&g[0] * 2.0)).unwrap();
        y.backward();
        y.backward();
        assert_eq!(to_f64(&x.grad()), [4.0]);
    });
}

#[test]
fn an_input_can_be_changed_in_place() {
    for_each_leaf(&[1.0, 2.0], |_, x| {
        let z = &x * 3.0;
        let y = double_(&z, None).unwrap();
        assert_eq!(to_f64(&z), [6.0, 12.0]);
        assert_eq!(y.data_ptr(), z.data_ptr());
        // The history of the changed tensor contains the function.
        (z.square()).sum(None).backward();
        assert_eq!(to_f64(&x.grad()), [72.0, 144.0]);
    });
}

#[test]
fn a_change_in_place_is_detected_if_the_tensor_was_saved() {
    for_each_leaf(&[1.0, 2.0], |_, x| {
        let z = &x * 3.0;
        let squared = z.square();
        drop(double_(&z, None).unwrap());
        assert_says(squared.sum(None).f_backward(), "modified by an inplace operation");
    });
}

#[test]
fn a_view_can_be_changed_in_place() {
    for_each_leaf(&[1.0, 2.0], |_, x| {
        let z = &x * 3.0;
        drop(double_(&z.narrow(0, 0, 1), None).unwrap());
        z.sum(None).backward();
        assert_eq!(to_f64(&x.grad()), [6.0, 3.0]);
    });
}

#[test]
fn a_leaf_that_requires_a_gradient_cannot_be_dirty() {
    for_each_device(|device| {
        let error = double_(&leaf(&[1.0], Kind::Double, device), None).unwrap_err();
        assert!(
            matches!(&error, Error::Function(FunctionError::Misuse { name, problem })
        if name == "function" && problem.contains("leaf")),
            "{error}"
        );
        // Under `no_grad` it can be.
        let x = leaf(&[1.0], Kind::Double, device);
        drop(no_grad(|| double_(&x, None)).unwrap());
        assert_eq!(to_f64(&x), [2.0]);
    });
}

#[test]
fn wrong_marks_are_refused() {
    for_each_leaf(&[1.0], |_, x| {
        let try_marks = |mark: fn(&mut ForwardContext, &Tensor, &Tensor)| {
            let forward = move |ctx: &mut _, x: &[&Tensor]| {
                let y = x[0] * 2.0;
                mark(ctx, x[0], &y);
                Ok(y)
            };
            let out = tch_amp::function(forward, |_, g| Ok(&g[0] * 2.0))
                .name("Marks")
                .apply(&[&(&x * 1.0)]);
            out.unwrap_err().to_string()
        };
        let other = try_marks(|ctx, _, y| ctx.mark_dirty(&[y]));
        assert_eq!(other, "Marks: mark_dirty was given a tensor that is not an input");
        let kept = try_marks(|ctx, x, _| ctx.mark_dirty(&[x]));
        assert_eq!(kept, "Marks: an input that is marked dirty must be returned, and only once");
        let input = try_marks(|ctx, x, _| ctx.mark_non_differentiable(&[x]));
        assert_eq!(
            input,
            "Marks: mark_non_differentiable was given a tensor that is not an output"
        );
        let twice = |ctx: &mut ForwardContext, x: &[&Tensor]| {
            ctx.mark_dirty(x);
            let y = x[0].shallow_clone().f_mul_scalar_(2.0)?;
            Ok([y.shallow_clone(), y])
        };
        let refused = apply(&[&(&x * 1.0)], twice, |_, g| Ok(&g[0] + &g[1]));
        assert_says(refused, "must be returned, and only once");
    });
}

#[test]
fn outputs_can_be_marked_as_not_differentiable() {
    for_each_leaf(&[3.0, 1.0, 2.0], |device, x| {
        let [sorted, ranks] = apply(
            &[&x],
            |ctx, x| {
                let (sorted, index) = x[0].sort(0, false);
                let ranks = index.to_kind(tch::Kind::Double);
                ctx.mark_non_differentiable(&[&ranks]);
                ctx.save_for_backward(&[&index]);
                Ok([sorted, ranks])
            },
            |ctx, grads| {
                let [index] = ctx.saved_tensors()?;
                assert_eq!(to_f64(&grads[1]), [0.0; 3]);
                Ok(grads[0].zeros_like().scatter_add(0, &index, &grads[0]))
            },
        )
        .unwrap();
        assert!(sorted.requires_grad() && !ranks.requires_grad());
        (sorted * leaf(&[1.0, 10.0, 100.0], Kind::Double, device)).sum(None).backward();
        assert_eq!(to_f64(&x.grad()), [100.0, 1.0, 10.0]);
    });
}

#[test]
fn missing_gradients_are_none_without_materialization() {
    for_each_leaf(&[1.0], |_, x| {
        let [_, b] = apply(
            &[&x],
            |ctx, x| {
                ctx.set_materialize_grads(false);
                Ok([x[0] * 2.0, x[0] * 3.0])
            },
            |_, grads| {
                assert!(grads.get(0).is_none() && grads.get(1).is_some() && grads.get(2).is_none());
                let defined: Vec<bool> = grads.iter().map(|grad| grad.is_some()).collect();
                assert_eq!(defined, [false, true]);
                Ok(&grads[1] * 3.0)
            },
        )
        .unwrap();
        b.backward();
        assert_eq!(to_f64(&x.grad()), [3.0]);
    });
}

#[test]
fn indexing_a_missing_gradient_is_an_error() {
    for_each_device(|device| {
        let index = |index: usize| {
            let [_, b] = apply(
                &[&leaf(&[1.0], Kind::Double, device)],
                |ctx, x| {
                    ctx.set_materialize_grads(false);
                    Ok([x[0] * 2.0, x[0] * 3.0])
                },
                move |_, grads| Ok(&grads[index] * 3.0),
            )
            .unwrap();
            b.f_backward()
        };
        assert_says(index(0), "there is no gradient of output 0 of 2: look with get()");
        assert_says(index(2), "there is no output 2: the function has 2");
    });
}

#[test]
fn later_marks_replace_earlier_ones() {
    for_each_leaf(&[2.0], |_, x| {
        let forward = |ctx: &mut ForwardContext, x: &[&Tensor]| {
            let [one, other] = [1.0, 2.0].map(|factor| x[0] * factor);
            ctx.mark_non_differentiable(&[&one]);
            ctx.mark_non_differentiable(&[&other]);
            ctx.mark_dirty(x);
            ctx.mark_dirty::<&Tensor>(&[]);
            Ok([one, other])
        };
        let [one, other] = apply(&[&x], forward, |_, g| Ok(&g[0] * 1.0)).unwrap();
        assert!(one.requires_grad() && !other.requires_grad());
    });
}

#[test]
fn an_input_that_was_changed_in_place_can_be_marked_as_not_differentiable() {
    for_each_leaf(&[3.0], |_, x| {
        let forward = |ctx: &mut ForwardContext, x: &[&Tensor]| {
            ctx.mark_dirty(x);
            ctx.mark_non_differentiable(x);
            Ok(x[0].shallow_clone().f_mul_scalar_(2.0)?)
        };
        let y = apply(&[&(&x * 1.0)], forward, |_, g| Ok(&g[0] * 2.0)).unwrap();
        assert_eq!((to_f64(&y), y.requires_grad()), (vec![6.0], false));
    });
}

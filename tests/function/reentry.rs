//! A backward that runs a backward.

use std::sync::{Arc, Mutex};

use tch::{Device, Tensor, with_grad};
use tch_amp::function::{BackwardContext, ForwardContext, Function, FunctionResult, GradOutputs};

use crate::common::for_each_device;
use crate::{apply, backward_below, leaf, message, square, to_f64};

/// x², whose backward finds its answer by another backward, `depth` of them inside each other.
#[derive(Clone, Copy)]
struct Nested {
    depth: usize,
}

impl Function for Nested {
    type Outputs = Tensor;
    type Gradients = Tensor;

    fn forward(&self, ctx: &mut ForwardContext, x: &[&Tensor]) -> FunctionResult<Tensor> {
        ctx.save_for_backward(x);
        Ok(x[0].square())
    }

    fn backward(&self, ctx: &BackwardContext<'_>, g: &GradOutputs<'_>) -> FunctionResult<Tensor> {
        let [x] = ctx.saved_tensors()?;
        let x = x.detach().set_requires_grad(true);
        let y: tch_amp::Result<Tensor> = with_grad(|| match self.depth {
            0 => Ok(x.square().sum(None)),
            depth => Ok(Nested { depth: depth - 1 }.apply(&[&x])?.sum(None)),
        });
        y?.f_backward()?;
        Ok(x.grad() * &g[0])
    }
}

#[test]
fn a_backward_may_run_another_at_any_depth() {
    for_each_device(|device| {
        for depth in [0, 1, 59, 60, 61, 130] {
            let x = leaf(device, &[3.0, -1.0]);
            Nested { depth }.apply(&[&x]).unwrap().sum(None).backward();
            assert_eq!(to_f64(&x.grad()), [6.0, -2.0], "depth {depth}");
        }
    });
}

/// Where a function's backward finds its own output.
type Cell = Arc<Mutex<Option<Tensor>>>;

/// A function whose backward runs a backward from its own output, `depth` others in between.
fn through_itself(device: Device, depth: usize) -> String {
    let cell: Cell = Arc::default();
    let x = leaf(device, &[1.0]);
    let inside = Arc::clone(&cell);
    let backward = move |_: &BackwardContext<'_>, g: &GradOutputs<'_>| {
        let output = inside.lock().unwrap().as_ref().map(Tensor::shallow_clone);
        backward_below(depth, output.unwrap())?;
        Ok(g[0].shallow_clone())
    };
    let function = tch_amp::function(|_, x| Ok(x[0] * 2.0), backward).name("Ouroboros");
    let y = function.apply(&[&x]).unwrap();
    *cell.lock().unwrap() = Some(y.shallow_clone());
    let error = message(y.f_backward());
    // The cell is the leak that the documentation speaks of, and this ends it.
    *cell.lock().unwrap() = None;
    error
}

#[test]
fn a_backward_through_itself_is_an_error() {
    // Past 60 the inner backward runs on another thread, where a lock would wait for ever.
    for_each_device(|device| {
        for depth in [0, 1, 30, 59, 60, 61, 62, 100] {
            let error = through_itself(device, depth);
            let want = "Ouroboros: its backward runs a backward that leads through itself again";
            assert!(error.contains(want), "depth {depth}: {error}");
        }
    });
}

#[test]
fn an_inner_backward_may_run_through_other_nodes_of_the_same_graph() {
    for_each_device(|device| {
        let x = leaf(device, &[2.0]);
        let middle = square(&x).unwrap();
        let y = apply(
            &[&middle],
            |ctx, x| {
                ctx.save_for_backward(x);
                Ok(x[0] * 3.0)
            },
            |ctx, g| {
                let [middle] = ctx.saved_tensors()?;
                let inner = with_grad(|| middle.sum(None));
                let x = Tensor::f_run_backward(&[inner], &[&middle], true, false)?;
                Ok(&g[0] * 3.0 * &x[0])
            },
        )
        .unwrap();
        y.backward();
        assert_eq!(to_f64(&x.grad()), [12.0]);
    });
}

#[test]
fn after_the_error_the_function_works_again() {
    for_each_device(|device| {
        assert!(through_itself(device, 0).contains("Ouroboros"));
        let x = leaf(device, &[3.0]);
        Nested { depth: 70 }.apply(&[&x]).unwrap().backward();
        assert_eq!(to_f64(&x.grad()), [6.0]);
    });
}

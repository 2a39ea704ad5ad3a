//! Backwards that run another backward.

use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};

use tch::{Device, Kind, Tensor, with_grad};
use tch_amp::autocast::{AutocastGuard, clear_autocast_cache};
use tch_amp::function::{BackwardContext, ForwardContext, Function, FunctionResult, GradOutputs};

use crate::OnDrop;
use crate::function::{apply, backward_below, for_each_leaf, in_time, message, square, to_f64};
use testkit::for_each_device;
use testkit::tensors::leaf;

/// x², whose backward computes its result by another backward, nested `depth` times.
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
            let x = leaf(&[3.0, -1.0], Kind::Double, device);
            Nested { depth }.apply(&[&x]).unwrap().sum(None).backward();
            assert_eq!(to_f64(&x.grad()), [6.0, -2.0], "depth {depth}");
        }
    });
}

/// The place where a function's backward finds its own output.
type Cell = Arc<Mutex<Option<Tensor>>>;

/// A function whose backward runs a backward from its own output, nested in `depth` others.
fn through_itself(device: Device, depth: usize) -> String {
    let cell: Cell = Arc::default();
    let x = leaf(&[1.0], Kind::Double, device);
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
    // The cell is the reference cycle that the documentation warns about; this breaks it.
    *cell.lock().unwrap() = None;
    error
}

#[test]
fn a_backward_through_itself_is_an_error() {
    // Deeper than 60, the inner backward runs on another thread, where a lock would be a deadlock.
    for_each_device(|device| {
        for depth in [0, 1, 30, 59, 60, 61, 62, 100] {
            let error = in_time(move || through_itself(device, depth));
            let want = "Ouroboros: its backward runs a backward that leads through itself again";
            assert!(error.contains(want), "depth {depth}: {error}");
        }
    });
}

#[test]
fn an_inner_backward_may_run_through_other_nodes_of_the_same_graph() {
    for_each_leaf(&[2.0], |_, x| {
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
fn a_function_can_be_used_again_after_the_error() {
    for_each_device(|device| {
        assert!(in_time(move || through_itself(device, 0)).contains("Ouroboros"));
        let x = leaf(&[3.0], Kind::Double, device);
        Nested { depth: 70 }.apply(&[&x]).unwrap().backward();
        assert_eq!(to_f64(&x.grad()), [6.0]);
    });
}

#[test]
fn a_destructor_of_a_saved_value_may_run_a_backward_through_its_own_call() {
    for_each_device(|device| {
        let error = in_time(move || {
            let cell: Cell = Arc::default();
            let (send, receive) = channel();
            let inside = Mutex::new(Some((Arc::clone(&cell), send)));
            let forward = move |ctx: &mut ForwardContext, x: &[&Tensor]| {
                let (cell, send) = inside.lock().unwrap().take().unwrap();
                ctx.save_value(OnDrop(move || {
                    let output = cell.lock().unwrap().take();
                    drop(send.send(message(output.unwrap().f_backward())));
                }));
                Ok(x[0] * 2.0)
            };
            let y = apply(&[leaf(&[1.0], Kind::Double, device)].each_ref(), forward, |_, g| {
                Ok(&g[0] * 2.0)
            });
            let y = y.unwrap();
            *cell.lock().unwrap() = Some(y.shallow_clone());
            y.backward();
            receive.recv().unwrap()
        });
        assert!(
            error.contains("function: trying to backward through the graph a second time"),
            "{error}"
        );
    });
}

/// A weight that only its cached cast keeps alive, and whose gradient's graph contains a function: `destructor` runs
/// when that is dropped, which happens when the cache is cleared.
fn dropped_with_the_cache(device: Device, destructor: impl FnMut() + Send + 'static) {
    let destructor = Mutex::new(OnDrop(destructor));
    let backward = move |_: &BackwardContext<'_>, g: &GradOutputs<'_>| {
        drop(destructor.lock());
        Ok(g[0].shallow_clone())
    };
    let w = Tensor::ones([2, 2], (Kind::Float, device)).set_requires_grad(true);
    w.sum(Kind::Float).backward();
    let x = Tensor::ones([2, 2], (Kind::Float, device)).set_requires_grad(true);
    let y = apply(&[&x], |_, x| Ok(x[0] * 2.0), backward).unwrap();
    let _sum = w.grad().f_add_(&y).unwrap();
    let _product = w.mm(&w);
}

#[test]
fn a_destructor_that_runs_while_the_cache_is_cleared_may_use_it() {
    for_each_device(|device| {
        let seen = in_time(move || {
            let (send, receive) = channel();
            let guard = AutocastGuard::new(device).unwrap();
            for _ in 0..2 {
                let send = send.clone();
                dropped_with_the_cache(device, move || {
                    clear_autocast_cache();
                    let w = Tensor::ones([2, 2], (Kind::Float, device)).set_requires_grad(true);
                    let product = tch_amp::autocast(device, || w.mm(&w)).unwrap();
                    send.send(product.kind()).unwrap();
                });
                clear_autocast_cache();
            }
            let last = send;
            dropped_with_the_cache(device, move || {
                let inner = AutocastGuard::new(device).unwrap();
                last.send(tch_amp::autocast::autocast_dtype(device).unwrap()).unwrap();
                drop(inner);
                clear_autocast_cache();
            });
            drop(guard);
            receive.iter().collect::<Vec<_>>()
        });
        let low = if device.is_cuda() { Kind::Half } else { Kind::BFloat16 };
        assert_eq!(seen, [low; 3]);
    });
}

//! Custom autograd functions: what they compute, record, refuse, and leave behind. On a GPU, their backwards run on a
//! thread that libtorch has for the device, not on the caller's.

mod autocast;
mod cases;
mod checkpoint;
mod context;
mod errors;
mod grad;
mod inputs;
mod memory;
mod outputs;
mod panics;
mod reentry;
mod second;
mod threads;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tch::{Device, Kind, Tensor, with_grad};
use tch_amp::function::{BackwardContext, ForwardContext, FunctionResult, GradOutputs, Outputs};

use testkit::functions::MyMm;
use testkit::tensors::{leaf, random_leaf};
use testkit::{for_each_device, to_f64};

/// Runs `test` on each device with an f64 leaf of these values.
pub fn for_each_leaf(values: &[f64], test: impl Fn(Device, Tensor)) {
    for_each_device(|device| test(device, leaf(values, Kind::Double, device)));
}

/// x², whose derivative consists of differentiable operations.
fn square(x: &Tensor) -> tch_amp::Result<Tensor> {
    apply(
        &[x],
        |ctx, x| {
            ctx.save_for_backward(x);
            Ok(x[0].square())
        },
        |ctx, g| {
            let [x] = ctx.saved_tensors()?;
            Ok(&g[0] * x * 2.0)
        },
    )
}

/// Doubles its input in place; with `cast`, in that dtype inside of a region.
fn double_(x: &Tensor, cast: Option<Kind>) -> tch_amp::Result<Tensor> {
    let double = tch_amp::function(
        |ctx, x| {
            ctx.mark_dirty(x);
            Ok(x[0].shallow_clone().f_mul_scalar_(2.0)?)
        },
        |_, g| Ok(&g[0] * 2.0),
    );
    cast.map_or(double, |dtype| double.cast_inputs(dtype)).apply(&[x])
}

/// Runs the backward of `y` inside of `depth` others.
fn backward_below(depth: usize, y: Tensor) -> FunctionResult<()> {
    if depth == 0 {
        return Ok(y.f_backward()?);
    }
    let x = leaf(&[1.0], Kind::Double, y.device());
    let y = Mutex::new(y);
    let outer = with_grad(|| {
        apply(
            &[&x],
            |_, x| Ok(x[0] * 1.0),
            move |_, g| {
                backward_below(depth - 1, y.lock().unwrap().shallow_clone())?;
                Ok(g[0].shallow_clone())
            },
        )
    })?;
    Ok(outer.f_backward()?)
}

/// Counts how many of its values exist.
#[derive(Debug)]
struct Counted(Arc<AtomicUsize>);

impl Counted {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(count))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A value that a closure owns and does not use.
#[derive(Debug)]
struct Owning<T>(#[allow(dead_code, reason = "it is there to be dropped")] T);

impl<T> Owning<T> {
    /// Makes the closure that calls this capture the value.
    fn hold(&self) {}
}

/// Runs `test` on a thread of its own and fails after a minute, because a failure would be a deadlock.
fn in_time<T: Send + 'static>(test: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, receive) = channel();
    let thread = std::thread::spawn(move || send.send(test()));
    match receive.recv_timeout(Duration::from_secs(60)) {
        Ok(answer) => answer,
        Err(_) => {
            assert!(thread.is_finished(), "deadlock: not finished after a minute");
            panic!("{:?}", thread.join().expect_err("it panicked"));
        }
    }
}

fn message(result: Result<(), tch::TchError>) -> String {
    result.expect_err("it fails").to_string()
}

/// Applies a function made of two closures, for tests that do not need its type.
fn apply<O, G>(
    inputs: &[&Tensor],
    forward: impl Fn(&mut ForwardContext, &[&Tensor]) -> FunctionResult<O> + Send + 'static,
    backward: impl Fn(&BackwardContext<'_>, &GradOutputs<'_>) -> FunctionResult<G> + Send + 'static,
) -> tch_amp::Result<O>
where
    O: Outputs,
    G: tch_amp::function::Gradients,
{
    tch_amp::function(forward, backward).apply(inputs)
}

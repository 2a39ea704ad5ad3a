//! The cost of running a custom function forward and backward, compared with Python.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark fails by panicking")]

mod common;

use common::{Python, Rounds, nanoseconds, print_ratio, print_table, rounds};
use tch::Tensor;
use tch_amp::function;
use tch_amp::function::{BackwardContext, ForwardContext, Function, FunctionResult, GradOutputs};

const CALLS: usize = 2_000;

/// One multiplication in forward and one in backward.
#[derive(Clone, Copy)]
struct Scale;

impl Function for Scale {
    type Outputs = Tensor;
    type Gradients = [Option<Tensor>; 2];

    fn forward(&self, ctx: &mut ForwardContext, inputs: &[&Tensor]) -> FunctionResult<Tensor> {
        ctx.save_for_backward(&inputs[1..]);
        Ok(inputs[0] * inputs[1])
    }

    fn backward(
        &self,
        ctx: &BackwardContext<'_>,
        grads: &GradOutputs<'_>,
    ) -> FunctionResult<[Option<Tensor>; 2]> {
        let [factor] = ctx.saved_tensors()?;
        Ok([Some(&grads[0] * factor), None])
    }
}

/// One multiplication in forward, and one for each input in backward.
#[derive(Clone, Copy)]
struct Product;

impl Function for Product {
    type Outputs = Tensor;
    type Gradients = [Tensor; 2];

    fn forward(&self, ctx: &mut ForwardContext, inputs: &[&Tensor]) -> FunctionResult<Tensor> {
        ctx.save_for_backward(inputs);
        Ok(inputs[0] * inputs[1])
    }

    fn backward(
        &self,
        ctx: &BackwardContext<'_>,
        grads: &GradOutputs<'_>,
    ) -> FunctionResult<[Tensor; 2]> {
        let [a, b] = ctx.saved_tensors()?;
        Ok([&grads[0] * b, &grads[0] * a])
    }
}

fn main() {
    let Some(mut python) = Python::start("function.py") else {
        return;
    };
    tch::set_num_threads(1);
    let ours = [values(Scale, false), values(Scale, false), values(Product, true)].join(";");
    assert_eq!(
        ours,
        python.ask("values scale amp_scale product"),
        "the two sides compute different results"
    );
    let count = rounds(150);
    let ours = || {
        let scale = round_trip(|a, b| Scale.apply(&[a, b]).unwrap(), false);
        // Every function here includes what custom_fwd and custom_bwd add in Python, so one time is compared with both.
        vec![scale, scale, closures(), both(), forward(), round_trip(|a, b| a * b, false)]
    };
    let python = || {
        let mut time = |request: &str| python.time(&format!("{request} {CALLS}"))[0];
        let scale = time("both scale");
        let rest = ["both product", "forward scale", "both builtin"].map(&mut time);
        [vec![scale, time("both amp_scale"), scale], rest.to_vec()].concat()
    };
    let times = Rounds::run(count, ours, python);
    let scale = times.row("x * b, and grad * b for x", 0);
    let rows = [
        scale,
        times.row("the same, custom_fwd and custom_bwd in Python", 1),
        times.row("the same, of two closures", 2),
        times.row("a * b, and gradients for both", 3),
        times.row("x * b forward alone", 4),
        times.row("the built-in x * b, forward and backward", 5),
    ];
    print_table(&format!("one number forward and backward, {count} rounds"), &rows);
    print_ratio("function_forward_backward", scale);
}

fn inputs(both: bool) -> [Tensor; 2] {
    let leaf = |value: f32| Tensor::from_slice(&[value]);
    [leaf(1.25).set_requires_grad(true), leaf(-0.3).set_requires_grad(both)]
}

/// The output and the gradients, in the form of Python's answer.
fn values<F: Function<Outputs = Tensor>>(function: F, both: bool) -> String {
    let [a, b] = inputs(both);
    let out = function.apply(&[&a, &b]).unwrap();
    out.backward();
    let db = b.grad();
    let db = if db.defined() { db.double_value(&[0]) } else { 0.0 };
    let values = [out.double_value(&[0]), a.grad().double_value(&[0]), db];
    values.map(|value| format!("{:016x}", value.to_bits())).join(" ")
}

/// The time of a call, measured after some calls that warm up the processor, as in Python.
fn timed(mut call: impl FnMut()) -> f64 {
    (0..CALLS / 2).for_each(|_| call());
    nanoseconds(|| (0..CALLS).for_each(|_| call())) / CALLS as f64
}

/// Forward and backward with new leaves each time, so that gradients are stored and not accumulated.
fn round_trip(apply: impl Fn(&Tensor, &Tensor) -> Tensor, both: bool) -> f64 {
    let [mut a, mut b] = inputs(both);
    timed(|| {
        apply(&a, &b).backward();
        a = a.detach().set_requires_grad(true);
        if both {
            b = b.detach().set_requires_grad(true);
        }
    })
}

fn both() -> f64 {
    round_trip(|a, b| Product.apply(&[a, b]).unwrap(), true)
}

fn closures() -> f64 {
    let scale = function(
        |ctx, x| {
            ctx.save_for_backward(&x[1..]);
            Ok(x[0] * x[1])
        },
        |ctx, grads| {
            let [factor] = ctx.saved_tensors()?;
            Ok([Some(&grads[0] * factor), None])
        },
    );
    round_trip(|a, b| scale.apply(&[a, b]).unwrap(), false)
}

fn forward() -> f64 {
    let [a, b] = inputs(false);
    timed(|| drop(Scale.apply(&[&a, &b]).unwrap()))
}

//! `function::grad` beside `torch.autograd.grad`: its values, bit by bit, and the calls that it refuses.

use std::os::unix::process::ExitStatusExt as _;

use serde_json::{Value, json};
use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::function::{FunctionError, FunctionResult, GradConfig, grad};
use tch_amp::{Error, Result, autocast};

use crate::function::{apply, for_each_leaf, square};
use testkit::bits::bits;
use testkit::programs::this_test;
use testkit::python::Oracle;
use testkit::tensors::leaf;
use testkit::to_f64;

const F32: Kind = Kind::Float;
const DEFAULT: GradConfig<'static> =
    GradConfig { grad_outputs: &[], retain_graph: None, create_graph: false, allow_unused: false };
const KEPT: GradConfig<'static> = GradConfig { retain_graph: Some(true), ..DEFAULT };
const CREATES: GradConfig<'static> = GradConfig { create_graph: true, ..DEFAULT };
const ALLOWS: GradConfig<'static> = GradConfig { allow_unused: true, ..DEFAULT };

type Gradients = Result<Vec<Option<Tensor>>>;

fn x() -> Tensor {
    leaf(&[0.3, -1.25, 2.7], F32, Device::Cpu)
}

fn v(kind: Kind) -> Tensor {
    Tensor::from_slice(&[1.5, -2.0, 0.25]).to_kind(kind)
}

fn one(kind: Kind) -> Tensor {
    Tensor::ones([], (kind, Device::Cpu))
}

fn sum(y: &Tensor) -> Tensor {
    y.sum(None)
}

/// The gradients of `y` with a given one.
fn given(y: &Tensor, x: &Tensor, gradient: &Tensor) -> Gradients {
    grad(&[y], &[x], &GradConfig { grad_outputs: &[Some(gradient)], ..DEFAULT })
}

fn second(y: &Tensor, inputs: &[&Tensor]) -> Gradients {
    let first = grad(&[y], inputs, &CREATES)?;
    let squares: Tensor = first.iter().flatten().map(|g| sum(&g.square())).sum();
    Ok(first.into_iter().chain(grad(&[squares], inputs, &DEFAULT)?).collect())
}

fn twice(y: &Tensor, x: &Tensor, first: &GradConfig<'_>) -> Gradients {
    let first = grad(&[y], &[x], first)?;
    Ok(first.into_iter().chain(grad(&[y], &[x], &DEFAULT)?).collect())
}

fn matrices() -> [Tensor; 2] {
    [[0.3, -1.25, 2.7, 0.9], [1.1, 0.2, -0.7, 3.3]]
        .map(|values| leaf(&values, F32, Device::Cpu).detach().view([2, 2]).set_requires_grad(true))
}

fn product([a, b]: &[Tensor; 2]) -> Tensor {
    sum(&a.matmul(b).to_kind(F32).square())
}

fn complex_output(x: &Tensor) -> Tensor {
    let i = Tensor::complex(&Tensor::from(0f32), &Tensor::from(2f32));
    sum(&(x.to_kind(Kind::ComplexFloat) * i))
}

fn siblings(config: &GradConfig<'_>) -> Gradients {
    let parts = x().unbind(0);
    grad(&[&parts[0] * 2], &[&parts[1]], config)
}

fn fails(x: &Tensor) -> Tensor {
    apply(
        &[x],
        |_, x| Ok(x[0] * 1.0),
        |_, _| -> FunctionResult<[Tensor; 1]> { Err("it is told to".into()) },
    )
    .unwrap()
}

/// The cases of tests/oracle/function_grad.py.
fn cases() -> Vec<(&'static str, Gradients)> {
    let x = x();
    let exp = || x.exp();
    let (loss, unused) = (|| sum(&x.exp()), self::x());
    let none = Tensor::ones([3], (F32, Device::Cpu));
    let region = |f: &dyn Fn() -> Gradients| autocast(Device::Cpu, f).unwrap();
    let v32 = v(F32);
    vec![
        ("a sum", grad(&[sum(&x.sin())], &[&x], &DEFAULT)),
        ("given", given(&exp(), &x, &v32)),
        ("given in f64", given(&exp(), &x, &v(Kind::Double))),
        ("given as bf16", given(&exp(), &x, &v(Kind::BFloat16))),
        ("given as integers", given(&exp(), &x, &Tensor::from_slice(&[1i64, 2, 3]))),
        ("given as booleans", given(&exp(), &x, &Tensor::from_slice(&[true, false, true]))),
        (
            "two outputs, one given",
            grad(
                &[exp(), sum(&x)],
                &[&x],
                &GradConfig { grad_outputs: &[Some(&v32), None], ..DEFAULT },
            ),
        ),
        ("one element in two dimensions", grad(&[loss().view([1, 1])], &[&x], &DEFAULT)),
        ("one output twice", {
            let y = loss();
            grad(&[&y, &y], &[&x], &DEFAULT)
        }),
        ("one input twice", grad(&[loss()], &[&x, &x], &DEFAULT)),
        ("an output that is the input", given(&x, &x, &v32)),
        ("an intermediate input", {
            let middle = exp();
            grad(&[sum(&middle.sin())], &[&middle, &x], &DEFAULT)
        }),
        ("no elements", given(&x.narrow(0, 0, 0), &x, &v32.narrow(0, 0, 0))),
        ("a complex output, given", {
            let gradient = Tensor::complex(&Tensor::from(0.5f32), &Tensor::from(-1f32));
            given(&complex_output(&x), &x, &gradient)
        }),
        ("a graph that is kept", twice(&loss(), &x, &KEPT)),
        ("a graph that create_graph keeps", twice(&loss(), &x, &CREATES)),
        ("second derivatives", second(&loss(), &[&x])),
        (
            "second derivatives of a custom function",
            second(&sum(&square(&x).unwrap().exp()), &[&x]),
        ),
        ("an unused input, allowed", grad(&[loss()], &[&x, &unused], &ALLOWS)),
        ("a sibling, allowed", siblings(&ALLOWS)),
        ("a product in a region", {
            let m = matrices();
            let loss = autocast(Device::Cpu, || product(&m)).unwrap();
            grad(&[loss], &m, &DEFAULT)
        }),
        ("a call in a region", {
            let m = matrices();
            let loss = product(&m);
            region(&|| grad(&[&loss], &m, &DEFAULT))
        }),
        (
            "second derivatives in a region",
            region(&|| {
                let m = matrices();
                second(&product(&m), &[&m[0], &m[1]])
            }),
        ),
        ("under no_grad", {
            let y = loss();
            no_grad(|| grad(&[y], &[&x], &DEFAULT))
        }),
        ("no graph", grad(&[one(F32)], &[&x], &DEFAULT)),
        ("no graph, given", given(&none, &x, &v32)),
        ("a second output without a graph", grad(&[sum(&x), one(F32)], &[&x], &DEFAULT)),
        ("integers", grad(&[x.argmax(None, false)], &[&x], &DEFAULT)),
        ("several elements", grad(&[exp()], &[&x], &DEFAULT)),
        (
            "several elements and None",
            grad(&[exp(), sum(&x)], &[&x], &GradConfig { grad_outputs: &[None, None], ..DEFAULT }),
        ),
        ("no elements and None", grad(&[x.narrow(0, 0, 0)], &[&x], &DEFAULT)),
        ("a complex output", grad(&[complex_output(&x)], &[&x], &DEFAULT)),
        ("another shape", given(&exp(), &x, &one(F32).view([1]))),
        ("a shape that could be broadcast", given(&sum(&x), &x, &one(F32).view([1]))),
        ("a complex gradient of a real output", given(&exp(), &x, &v(Kind::ComplexFloat))),
        ("a real gradient of a complex output", given(&complex_output(&x), &x, &one(F32))),
        (
            "fewer gradients than outputs",
            grad(
                &[sum(&x), sum(&x)],
                &[&x],
                &GradConfig { grad_outputs: &[Some(&one(F32))], ..DEFAULT },
            ),
        ),
        ("an unused input", grad(&[loss()], &[&x, &unused], &DEFAULT)),
        ("a sibling", siblings(&DEFAULT)),
        ("an input that requires none", grad(&[sum(&x)], &[&none], &DEFAULT)),
        ("an input that requires none, allowed", grad(&[sum(&x)], &[&none], &ALLOWS)),
        ("no inputs", grad(&[sum(&x)], &[] as &[Tensor], &DEFAULT)),
        ("no outputs", grad(&[] as &[Tensor], &[&x], &DEFAULT)),
        ("a freed graph", twice(&loss(), &x, &DEFAULT)),
        (
            "a graph that is not kept",
            twice(&loss(), &x, &GradConfig { retain_graph: Some(false), ..CREATES }),
        ),
        ("a backward that fails", grad(&[sum(&fails(&x))], &[&x], &DEFAULT)),
    ]
}

#[test]
fn gradients_are_pythons_and_the_same_calls_fail() {
    let Some(oracle) = Oracle::find("function_grad.py") else { return };
    tch::set_num_threads(1);
    let theirs: Value = serde_json::from_str(&oracle.run(&[], "")).unwrap();
    let bits = |gradient: &Option<Tensor>| gradient.as_ref().map(bits);
    let ours = cases().into_iter().map(|(name, gradients)| {
        let bits = gradients.map(|list| list.iter().map(bits).collect::<Vec<_>>());
        (name.to_owned(), bits.map_or_else(|_| json!("error"), |bits| json!(bits)))
    });
    let ours: serde_json::Map<_, _> = ours.collect();
    let names = |cases: &serde_json::Map<String, Value>| cases.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&ours), names(theirs.as_object().unwrap()));
    for (name, ours) in ours {
        assert_eq!(ours, theirs[&name], "{name}");
    }
}

#[test]
fn each_refusal_says_what_is_wrong_and_nothing_has_changed() {
    let (x, unused) = (x(), x());
    let (constant, undefined) = (one(F32), Tensor::new());
    let y = sum(&x.exp());
    let (vector, nothing) = ([Some(&x)], [Some(&undefined)]);
    let with = |gradients| GradConfig { grad_outputs: gradients, ..DEFAULT };
    let calls: [(&[&Tensor], &[&Tensor], GradConfig<'_>, &str); 10] = [
        (&[&y, &constant], &[&x], DEFAULT, "output 1 has no graph"),
        (
            &[&y, &x],
            &[&x],
            DEFAULT,
            "the gradient of output 1 is not given, but the output has 3 elements",
        ),
        (
            &[&y],
            &[&x],
            with(&vector),
            "of output 0 is Float of shape [3], but the output is Float of shape []",
        ),
        (&[&y], &[&x, &constant], DEFAULT, "input 1 does not require a gradient"),
        (&[&y], &[&x, &unused], DEFAULT, "do not depend on input 1"),
        (&[&y, &undefined], &[&x], DEFAULT, "outputs has an undefined tensor at index 1"),
        (&[&y], &[&undefined], ALLOWS, "inputs has an undefined tensor at index 0"),
        (&[&y], &[&x], with(&nothing), "grad_outputs has an undefined tensor at index 0"),
        // Python ignores the second gradient.
        (&[&y], &[&x], with(&[None, None]), "grad_outputs has 2 elements, and `outputs` has 1"),
        // Python returns no gradient.
        (&[], &[&x], ALLOWS, "outputs is empty"),
    ];
    for (outputs, inputs, config, problem) in calls {
        let error = grad(outputs, inputs, &config).unwrap_err();
        assert!(
            matches!(error, Error::Function(_) | Error::InvalidArgument { .. }),
            "{problem}: {error}"
        );
        assert!(error.to_string().contains(problem), "{error}");
        assert!(!x.grad().defined(), "{problem}");
    }
    // The graph has not been freed.
    let gradients = grad(&[y], &[&x], &DEFAULT).unwrap();
    assert_eq!(gradients, [Some(x.detach().exp())]);
}

/// The graph does not show whether a function will return a gradient for its input.
#[test]
fn an_input_for_which_a_function_returns_no_gradient_is_unused() {
    let forgetful = |x: &Tensor| apply(&[x], |_, x| Ok(x[0] * 1.0), |_, _| Ok([None])).unwrap();
    let x = x();
    let found = grad(&[sum(&forgetful(&x))], &[&x], &DEFAULT);
    assert!(matches!(found, Err(Error::Function(FunctionError::Unused { input: 0 }))), "{found:?}");
    assert_eq!(grad(&[sum(&forgetful(&x))], &[&x], &ALLOWS).unwrap(), [None]);
}

#[test]
fn a_panic_of_a_backward_is_an_error_of_the_call() {
    for_each_leaf(&[1.0], |_, x| {
        let y = apply(
            &[&x],
            |_, x| Ok(x[0] * 1.0),
            |_, _| -> FunctionResult<[Tensor; 1]> { panic!("it has gone wrong") },
        );
        let y = y.unwrap();
        let error = grad(&[y], &[&x], &DEFAULT).unwrap_err();
        assert!(matches!(error, Error::Torch(_)), "{error}");
        assert!(error.to_string().contains("it has gone wrong"), "{error}");
    });
}

#[test]
fn gradients_can_be_computed_within_a_backward() {
    for_each_leaf(&[0.5, 2.0], |_, x| {
        // The derivative of x³, by way of a graph of its own.
        let cube = apply(
            &[&x],
            |ctx, x| {
                ctx.save_for_backward(x);
                Ok(x[0].pow_tensor_scalar(3))
            },
            |ctx, g| {
                let [x] = ctx.saved_tensors()?;
                let x = x.detach().set_requires_grad(true);
                let y = tch::with_grad(|| x.pow_tensor_scalar(3));
                Ok(grad(&[y], &[&x], &GradConfig { grad_outputs: &[Some(&g[0])], ..DEFAULT })?)
            },
        );
        let found = grad(&[sum(&cube.unwrap())], &[&x], &DEFAULT).unwrap();
        assert_eq!(to_f64(found[0].as_ref().unwrap()), [0.75, 12.0]);
    });
}

#[test]
#[ignore = "its process ends; the next test runs it"]
fn runs_backward_of_an_output_without_a_graph() {
    drop(Tensor::f_run_backward(&[one(F32)], &[&x()], false, false));
}

/// Why there is `grad`. If this fails, tch has been corrected, and docs/differences.md is to be.
#[test]
fn run_backward_of_tch_ends_the_process_for_an_output_without_a_graph() {
    let child = this_test("function::grad::runs_backward_of_an_output_without_a_graph").output();
    let child = child.unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(said.contains("running 1 test\n") && child.status.signal().is_some(), "{child:?}");
}

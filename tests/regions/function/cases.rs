//! Custom functions compared with Python: the same functions in both languages, on the same random inputs, bit by bit.
//! Python computes on the CPU. This crate's functions run there and on the simulated GPUs, where backward runs on a
//! thread of the device.

use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};
use tch_amp::function::{Function, GradConfig, grad};
use tch_amp::{Autocast, autocast, function};

use testkit::bits::{bits, hex, kind_named};
use testkit::functions::MyMm;
use testkit::python::Oracle;
use testkit::rng::Rng;
use testkit::{for_each_device, gpus_that_round_as_the_cpu};

const ROUNDS: usize = 40;

/// Computes the outputs of a case from its inputs.
type Case = Box<dyn Fn(&[Tensor]) -> Vec<Tensor>>;

fn product(cast: bool, dtype: Kind, enabled: bool) -> Case {
    Box::new(move |inputs| {
        let cast = cast.then_some(Kind::Float);
        let region = Autocast::new(inputs[0].device()).dtype(dtype).enabled(enabled);
        let out = region.run(|| MyMm { cast }.apply(inputs)).unwrap().unwrap();
        out.to_kind(Kind::Float).square().sum(None).backward();
        vec![out]
    })
}

/// The gradients, as part of the graph.
fn differentiable(y: &Tensor, inputs: &[Tensor]) -> Vec<Tensor> {
    let config = GradConfig { create_graph: true, ..Default::default() };
    grad(&[y], inputs, &config).unwrap().into_iter().flatten().collect()
}

fn penalty_product(inputs: &[Tensor]) -> Vec<Tensor> {
    let out = MyMm::default().apply(inputs).unwrap();
    let grads = differentiable(&out.square().sum(None), inputs);
    let squares = grads[0].square().sum(None) + grads[1].square().sum(None);
    (out.sum(None) + squares).backward();
    std::iter::once(out).chain(grads).collect()
}

fn penalty(inputs: &[Tensor]) -> Vec<Tensor> {
    let swish = function(
        |ctx, x| {
            ctx.save_for_backward(x);
            Ok(x[0] * x[0].sigmoid())
        },
        |ctx, g| {
            let [x] = ctx.saved_tensors()?;
            let gate = x.sigmoid();
            Ok(&g[0] * (&gate * (x * (1.0 - &gate) + 1.0)))
        },
    );
    let out = swish.apply(inputs).unwrap();
    let grad = differentiable(&out.square().sum(None), inputs).remove(0);
    (out.sum(None) + grad.square().sum(None)).backward();
    vec![out, grad]
}

/// x σ(1.702 x), the sigmoid approximation of GELU, which saves its output and an intermediate tensor.
fn gelu(inputs: &[Tensor]) -> Vec<Tensor> {
    let gelu = function(
        |ctx, x| {
            let gate = (x[0] * 1.702).sigmoid();
            let out = x[0] * &gate;
            ctx.save_for_backward(&[x[0], &gate, &out]);
            Ok(out)
        },
        |ctx, g| {
            let [_, gate, out] = ctx.saved_tensors()?;
            Ok(&g[0] * (&gate + out * (1.0 - &gate) * 1.702))
        },
    );
    let region = Autocast::new(inputs[0].device()).dtype(Kind::BFloat16);
    let out = region.run(|| gelu.apply(&[inputs[0].mm(&inputs[1])])).unwrap().unwrap();
    out.to_kind(Kind::Float).sum(None).backward();
    vec![out]
}

fn sort(inputs: &[Tensor]) -> Vec<Tensor> {
    let sort = function(
        |ctx, x| {
            let (values, index) = x[0].sort(1, false);
            let ranks = index.to_kind(x[0].kind());
            ctx.mark_non_differentiable(&[&ranks]);
            ctx.save_for_backward(&[&index]);
            Ok([values, ranks])
        },
        |ctx, g| {
            let [index] = ctx.saved_tensors()?;
            Ok(g[0].zeros_like().scatter_add(1, &index, &g[0]))
        },
    );
    let [values, ranks] = sort.apply(inputs).unwrap();
    assert!(values.requires_grad() && !ranks.requires_grad());
    (&values * &ranks).sum(None).backward();
    vec![values, ranks]
}

/// Multiplies its first input in place.
fn dirty(inputs: &[Tensor]) -> Vec<Tensor> {
    let decay = function(
        |ctx, x| {
            let changed = x[0].shallow_clone().f_mul_scalar_(0.75)?;
            ctx.mark_dirty(&[x[0]]);
            ctx.save_for_backward(&[x[1]]);
            let sum = &changed + x[1];
            Ok([changed, sum])
        },
        |ctx, g| {
            let [y] = ctx.saved_tensors()?;
            Ok([(&g[0] + &g[1]) * 0.75 + y * 0.0, g[1].shallow_clone()])
        },
    );
    let x = &inputs[0] * 1.0;
    let [first, second] = decay.apply(&[&x, &inputs[1]]).unwrap();
    assert_eq!(first.data_ptr(), x.data_ptr());
    (first.square().sum(None) + second.square().sum(None)).backward();
    vec![first, second]
}

/// Does not materialize gradients, and returns none for its first input.
fn split(inputs: &[Tensor]) -> Vec<Tensor> {
    let split = function(
        |ctx, x| {
            ctx.set_materialize_grads(false);
            Ok([x[0] * 2.0, x[1] * 3.0])
        },
        |_, g| Ok([g.get(0).map(|g| g * 2.0), g.get(1).map(|g| g * 3.0)]),
    );
    let [first, second] = split.apply(inputs).unwrap();
    second.square().sum(None).backward();
    vec![first, second]
}

/// Every case with the dtypes of its inputs, which are square matrices.
fn cases() -> Vec<(String, Case, Vec<&'static str>)> {
    let mut cases: Vec<(String, Case, Vec<&'static str>)> = vec![
        ("penalty".into(), Box::new(penalty), vec!["float64"]),
        ("penalty".into(), Box::new(penalty), vec!["float32"]),
        ("penalty_product".into(), Box::new(penalty_product), vec!["float64"; 2]),
        ("gelu".into(), Box::new(gelu), vec!["float32"; 2]),
        ("sort".into(), Box::new(sort), vec!["float32"]),
        ("dirty".into(), Box::new(dirty), vec!["float32"; 2]),
        ("split".into(), Box::new(split), vec!["float32"; 2]),
    ];
    for (name, dtype, half) in
        [("bf16", Kind::BFloat16, "bfloat16"), ("fp16", Kind::Half, "float16")]
    {
        for (cast, kind) in [(false, ""), (true, "_cast")] {
            for (enabled, place) in [(true, ""), (false, "_outside")] {
                for inputs in [["float32"; 2], [half; 2]] {
                    let name = format!("product{kind}{place}_{name}");
                    cases.push((name, product(cast, dtype, enabled), inputs.to_vec()));
                }
            }
            // A half-precision and an f32 input fit together only once they are cast.
            let mixed = vec![half, "float32"];
            cases.push((format!("product{kind}_{name}"), product(cast, dtype, true), mixed));
        }
    }
    cases
}

/// A case with its inputs, which are leaves on the CPU.
struct Call {
    name: String,
    case: Case,
    inputs: Vec<Tensor>,
}

fn calls() -> Vec<Call> {
    let mut rng = Rng::new(29);
    let mut calls = Vec::new();
    for _ in 0..ROUNDS {
        for (name, case, kinds) in cases() {
            let size = 1 + rng.below(6) as i64;
            let inputs = kinds.iter().map(|kind| matrix(&mut rng, kind, size)).collect();
            calls.push(Call { name, case, inputs });
        }
    }
    calls
}

fn encode_all(tensors: &[Tensor]) -> Value {
    tensors.iter().map(encode).collect()
}

#[test]
fn functions_give_pythons_bits() {
    let Some(oracle) = Oracle::find("function_cases.py") else { return };
    tch::set_num_threads(1);
    let calls = calls();
    let request =
        |call: &Call| json!({ "case": call.name, "inputs": encode_all(&call.inputs) }).to_string();
    let printed =
        oracle.run(&[], &calls.iter().map(|call| request(call) + "\n").collect::<String>());
    let theirs: Vec<Value> =
        printed.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect();
    assert_eq!(theirs.len(), calls.len());
    let mut devices = vec![Device::Cpu];
    devices.extend(gpus_that_round_as_the_cpu());
    for device in &devices {
        for (index, (Call { name, case, inputs }, answer)) in calls.iter().zip(&theirs).enumerate()
        {
            let inputs: Vec<_> = inputs.iter().map(|input| leaf_on(*device, input)).collect();
            let outputs = case(&inputs);
            let grads: Vec<Tensor> = inputs.iter().map(Tensor::grad).collect();
            let of = format!("of call {index}, {name}, on {device:?}");
            assert!(outputs.iter().all(|output| output.device() == *device), "outputs {of}");
            assert_eq!(encode_all(&outputs), answer["outputs"], "outputs {of}");
            assert_eq!(encode_all(&grads), answer["grads"], "gradients {of}");
        }
    }
    println!("{} calls give the bits of Python's on {devices:?}", calls.len());
}

/// Unlike in PyTorch, casts of inputs take part in second derivatives. The reference writes the cast out.
#[test]
fn a_gradient_penalty_flows_through_a_cast() {
    for_each_device(|device| {
        let mut rng = Rng::new(31);
        for _ in 0..ROUNDS {
            let inputs = [(); 2].map(|()| leaf_on(device, &matrix(&mut rng, "bfloat16", 3)));
            let copies = inputs.each_ref().map(|t| t.detach().set_requires_grad(true));
            let penalty = |out: Tensor, inputs: &[Tensor; 2]| {
                let grads = differentiable(&out.square().sum(None), inputs);
                (grads[0].square().sum(None) + grads[1].square().sum(None)).backward();
                inputs.each_ref().map(|input| bits(&input.grad()))
            };
            let cast = MyMm { cast: Some(Kind::Float) };
            let ours = autocast(device, || cast.apply(&inputs)).unwrap().unwrap();
            let [a, b] = copies.each_ref().map(|t| t.to_kind(Kind::Float));
            assert_eq!(penalty(ours, &inputs), penalty(a.mm(&b), &copies));
        }
    });
}

fn matrix(rng: &mut Rng, kind: &str, size: i64) -> Tensor {
    let values: Vec<f64> = (0..size * size).map(|_| rng.eighth()).collect();
    let matrix = Tensor::from_slice(&values).view([size, size]).to_kind(kind_named(kind));
    matrix.set_requires_grad(true)
}

/// A new leaf on `device` with the values of `tensor`.
fn leaf_on(device: Device, tensor: &Tensor) -> Tensor {
    tensor.detach().copy().to_device(device).set_requires_grad(true)
}

fn encode(tensor: &Tensor) -> Value {
    if !tensor.defined() {
        return Value::Null;
    }
    let kind = match tensor.kind() {
        Kind::Float => "float32",
        Kind::Double => "float64",
        Kind::BFloat16 => "bfloat16",
        Kind::Half => "float16",
        other => panic!("no case has a {other:?} tensor"),
    };
    json!({ "kind": kind, "shape": tensor.size(), "bits": hex(tensor) })
}

#[test]
fn python_differs_as_documented() {
    if let Some(oracle) = Oracle::find("function_deviations.py") {
        assert_eq!(oracle.run(&[], "").trim(), "ok");
    }
}

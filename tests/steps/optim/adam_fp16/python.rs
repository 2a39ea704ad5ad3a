//! The same training runs in Python.

use serde_json::{Value, json};
use tch::{Kind, Tensor};

use super::{BETAS, Case, Data, KEYS, LR, SIZES, STEPS, Told};
use testkit::bits::{from_hex, hex};
use testkit::python::Oracle;

/// The request to Python.
fn program(case: Case, data: &Data, order: &str, wide: Kind) -> Value {
    let all = |list: &Vec<Tensor>| list.iter().map(hex).collect::<Vec<_>>();
    json!({
        "order": order,
        "wide": if wide == Kind::Float { "f32" } else { "f64" },
        "scale": case.scale,
        "lr": LR,
        "betas": BETAS,
        "eps": case.eps,
        "weight_decay": case.weight_decay,
        "decoupled": case.decoupled,
        "params": all(&data.params),
        "grads": data.grads.iter().map(all).collect::<Vec<_>>(),
    })
}

/// The same training runs in Python, with an order of operations and a precision.
pub fn theirs(oracle: &Oracle, runs: &[(Case, Data)], order: &str, wide: Kind) -> Vec<Vec<Told>> {
    let programs =
        runs.iter().map(|(case, data)| format!("{}\n", program(*case, data, order, wide)));
    let answers = oracle.run(&[], &programs.collect::<String>());
    let tensors = |list: &Value, kind: Kind| {
        let tensor = |(text, size): (&Value, &&[i64])| {
            Tensor::from_data_size(&from_hex(text.as_str().unwrap()), size, kind)
        };
        list.as_array().unwrap().iter().zip(&SIZES).map(tensor).collect::<Vec<_>>()
    };
    let step = |line: &&str| {
        let step: Value = serde_json::from_str(line).unwrap();
        Told {
            params: tensors(&step["param"], Kind::Half),
            states: KEYS.map(|key| tensors(&step[key], wide)),
            scale: step["scale"].as_f64().unwrap(),
        }
    };
    let lines: Vec<_> = answers.lines().collect();
    assert_eq!(lines.len(), runs.len() * STEPS);
    lines.chunks(STEPS).map(|steps| steps.iter().map(step).collect()).collect()
}

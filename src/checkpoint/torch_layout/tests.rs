//! Tests that the names of parameters are used only if they fit PyTorch's numbers, and of which groups are `fused`.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::io::Cursor;

use torch_files::{Dtype, Limits, TensorRef, TorchFile, Writer};

use super::*;
use crate::checkpoint::Checkpoint;
use crate::checkpoint::part::{OptimizerPart, Part};

fn text(text: &str) -> Value {
    text.into()
}

/// A tensor of f32 that is the whole storage 0.
fn tensor(numel: i64) -> TensorRef {
    TensorRef::contiguous("0", Dtype::Float32, vec![numel])
}

/// Returns the bytes of a file with one storage of 16 bytes.
fn saved(root: &Value) -> Vec<u8> {
    let mut out = Cursor::new(Vec::new());
    let writer = Writer::torch(root, [vec![0; 16]], &Limits::DEFAULT).unwrap();
    writer.write_to(&mut out).unwrap();
    out.into_inner()
}

fn dict(items: Vec<(&str, Value)>) -> Value {
    Value::Dict(items.into_iter().map(|(key, value)| (text(key), value)).collect())
}

fn list(names: &[&str]) -> Value {
    Value::List(names.iter().map(|name| text(name)).collect())
}

/// Reads an optimizer with two groups, with names next to the numbers and at the root. Returns the names of the
/// parameters in the groups and in the state, and whether they are numbers.
fn read(beside: &[&str], at_root: Option<Value>) -> (Vec<Vec<String>>, Vec<String>, bool) {
    let group = |numbers: &[i64], names: &[&str]| {
        let numbers = numbers.iter().map(|&number| Value::Int(number)).collect();
        let mut items = vec![
            ("params", Value::List(numbers)),
            ("lr", Value::Float(0.1)),
            ("momentum", Value::Float(0.9)),
            ("dampening", Value::Float(0.0)),
            ("weight_decay", Value::Float(0.0)),
            ("nesterov", Value::Bool(false)),
            ("maximize", Value::Bool(false)),
        ];
        if !names.is_empty() {
            items.push(("param_names", list(names)));
        }
        dict(items)
    };
    let buffer = dict(vec![("momentum_buffer", tensor(4).into())]);
    let optimizer = dict(vec![
        ("state", Value::Dict(vec![(Value::Int(1), buffer)])),
        ("param_groups", Value::List(vec![group(&[0, 1], beside), group(&[2], &["z"])])),
    ]);
    let mut root = vec![("opt", optimizer)];
    if let Some(names) = at_root {
        let ours = vec![
            ("parts", dict(vec![("opt", text("optimizer"))])),
            ("param_names", dict(vec![("opt", names)])),
        ];
        root.push(("tch_amp", dict(ours)));
    }
    let bytes = saved(&dict(root));
    let checkpoint = Checkpoint::from_bytes(bytes).unwrap();
    match &checkpoint.parts["opt"] {
        Part::Optimizer(OptimizerPart { state, param_groups, params_are_numbers, .. }) => {
            let groups = param_groups.iter().map(|group| group.params.clone()).collect();
            (groups, state.keys().cloned().collect(), *params_are_numbers)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn names_that_fit_are_taken() {
    let groups = |names: &[&[&str]]| Value::List(names.iter().map(|names| list(names)).collect());
    let (params, state, are_numbers) = read(&["a", "b"], None);
    assert_eq!(
        (params, state),
        (vec![vec!["a".into(), "b".into()], vec!["z".into()]], vec!["b".into()])
    );
    assert!(!are_numbers);
    let (params, state, are_numbers) = read(&[], Some(groups(&[&["a", "b"], &["c"]])));
    assert_eq!(
        (params, state),
        (vec![vec!["a".into(), "b".into()], vec!["c".into()]], vec!["b".into()])
    );
    assert!(!are_numbers);
}

#[test]
fn names_that_do_not_fit_are_not_taken() {
    let groups =
        |names: &[&[&str]]| Some(Value::List(names.iter().map(|names| list(names)).collect()));
    let wrong = [
        // One name too few, one too many, one in another group, too few or too many groups, or no names at all.
        (&["a"][..], None),
        (&["a", "b", "c"], None),
        (&[], None),
        (&[], groups(&[&["a"], &["b"]])),
        (&[], groups(&[&["a", "b", "c"], &["z"]])),
        (&[], groups(&[&["a"], &["b", "c"]])),
        (&[], groups(&[&["a", "b", "c"]])),
        (&[], groups(&[&["a", "b"], &["c"], &[]])),
        (&[], Some(Value::Int(3))),
    ];
    for (beside, at_root) in wrong {
        let shown = format!("{beside:?} {at_root:?}");
        let (params, state, are_numbers) = read(beside, at_root);
        let numbers = vec![vec!["0".to_owned(), "1".to_owned()], vec!["2".to_owned()]];
        assert_eq!((params, state), (numbers, vec!["1".to_owned()]), "{shown}");
        assert!(are_numbers, "{shown}");
    }
}

/// Returns the group as Python reads it after this crate has saved a checkpoint with one optimizer of one group.
fn fused(options: Vec<(&str, Value)>, state: &str, dtype: Dtype) -> Option<Value> {
    let zero = ("weight_decay", Value::Float(0.0));
    let group = [
        vec![("params", Value::List(vec![Value::Int(0)])), ("lr", Value::Float(0.1)), zero],
        options,
    ];
    let moment: Value = TensorRef { dtype, ..tensor(1) }.into();
    let optimizer = dict(vec![
        ("state", Value::Dict(vec![(Value::Int(0), dict(vec![(state, moment)]))])),
        ("param_groups", Value::List(vec![dict(group.concat())])),
    ]);
    let bytes = saved(&dict(vec![("opt", optimizer)]));
    let path = std::env::temp_dir().join(format!("tch-amp-fused-{}.pt", std::process::id()));
    Checkpoint::from_bytes(bytes).unwrap().save(&path).unwrap();
    let file = TorchFile::open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    match file.value().get("opt")?.get("param_groups")? {
        Value::List(groups) => groups[0].get("fused").cloned(),
        _ => None,
    }
}

#[test]
fn groups_are_fused_where_pytorch_has_the_kernels() {
    let flag = |name| (name, Value::Bool(false));
    let float = |name| (name, Value::Float(0.0));
    let sgd = || {
        vec![
            ("momentum", Value::Float(0.9)),
            float("dampening"),
            flag("nesterov"),
            flag("maximize"),
        ]
    };
    let adagrad = || {
        let options =
            [float("lr_decay"), float("eps"), float("initial_accumulator_value"), flag("maximize")];
        options.to_vec()
    };
    assert_eq!(fused(sgd(), "momentum_buffer", Dtype::Float32), Some(Value::Bool(true)));
    assert_eq!(fused(adagrad(), "sum", Dtype::Float32), Some(Value::Bool(true)));
    // There is no fused kernel for complex parameters.
    assert_eq!(fused(sgd(), "momentum_buffer", Dtype::Complex64), Some(Value::None));
}

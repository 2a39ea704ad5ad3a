//! Every op of PyTorch's own autocast lists, and every op that the dispatcher registers for autocast on the CPU, gives
//! the same dtypes, bits and errors under this crate's autocast as under Python's. The ops that it registers for
//! autocast on CUDA give there what they give outside of a region for inputs that were cast by hand.

mod args;
mod convolution;
mod cuda;
mod dtypes;
mod factorisation;
mod loss;
mod manual;
mod matrix;
mod not_in_tch;
mod oracle;
mod page;
mod pointwise;
mod pooling;
mod recurrent;
mod reduction;
mod spectral;
mod table;
mod upsampling;

use std::collections::BTreeSet;

use oracle::{Answers, Case, Output};
use tch::{Device, TchError};
use tch_amp::Autocast;

/// The result of the case in tch, in the oracle's form; `None` if tch cannot call the op.
fn run(case: &Case) -> Option<Result<Vec<Output>, String>> {
    let (_, call) = table::find(case.op())?;
    let args = case.args();
    let region = Autocast::new(Device::Cpu).dtype(case.dtype());
    let outputs = region.run(|| call(&args)).expect("the CPU has bf16 and fp16");
    Some(told(outputs))
}

/// The result of a call, in the oracle's form.
fn told(outputs: table::Outputs) -> Result<Vec<Output>, String> {
    outputs.map(|tensors| tensors.iter().map(oracle::output).collect()).map_err(first_line)
}

fn first_line(error: TchError) -> String {
    let TchError::Torch(message) = error else { panic!("{error} is not from libtorch") };
    message.lines().next().unwrap_or_default().to_owned()
}

/// How the two differ, without the bits.
fn difference(ours: &Result<Vec<Output>, String>, theirs: &Result<Vec<Output>, String>) -> String {
    let short = |side: &Result<Vec<Output>, String>| match side {
        Err(message) => format!("error {message:?}"),
        Ok(outputs) => {
            let types =
                |output: &Output| output.as_ref().map(|(kind, shape, _)| (*kind, shape.clone()));
            format!("{:?}", outputs.iter().map(types).collect::<Vec<_>>())
        }
    };
    let (ours, theirs) = (short(ours), short(theirs));
    if ours == theirs { format!("other bits in {ours}") } else { format!("{ours} for {theirs}") }
}

/// libtorch's message without its list of the dispatch keys that have a kernel: a region with overrides registers one for
/// all operators of the process.
fn without_backends(answer: Result<Vec<Output>, String>) -> Result<Vec<Output>, String> {
    let cut = |message: String| {
        let before = message.split(" is only available for these backends").next();
        before.map_or_else(String::new, str::to_owned)
    };
    answer.map_err(cut)
}

#[test]
fn every_op_of_the_lists_has_pytorchs_dtypes_and_bits() {
    let Some(answers) = oracle::answers() else { return };
    // Sums are split between threads.
    tch::set_num_threads(1);
    let (mut compared, mut errors, mut runs, mut failures) = (BTreeSet::new(), 0, 0, Vec::new());
    for case in &answers.cases {
        let Some(ours) = run(case) else {
            if not_in_tch::find(case.op()).is_none() {
                failures.push(format!("{}: neither in the table nor in NOT_IN_TCH", case.name()));
            }
            continue;
        };
        let (ours, theirs) = (without_backends(ours), without_backends(case.expected()));
        if ours != theirs {
            failures.push(format!("{}: {}", case.name(), difference(&ours, &theirs)));
        }
        runs += 1;
        errors += i32::from(theirs.is_err());
        compared.insert(case.op());
    }
    println!(
        "torch {}: compared {} ops in {runs} runs, {errors} of them errors on both sides",
        answers.torch,
        compared.len()
    );
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}

/// The ops that the oracle called.
fn called(answers: &Answers) -> BTreeSet<&str> {
    answers.cases.iter().map(Case::op).collect()
}

#[test]
fn every_op_registered_for_autocast_on_the_cpu_is_compared_or_named_with_a_reason() {
    let Some(answers) = oracle::answers() else { return };
    let called = called(answers);
    let (compared, rest): (Vec<_>, Vec<_>) = answers
        .registered
        .iter()
        .map(String::as_str)
        .partition(|op| called.contains(op) && table::find(op).is_some());
    println!(
        "AutocastCPU registers {} ops, {} are compared",
        answers.registered.len(),
        compared.len()
    );
    for op in rest {
        let missing = not_in_tch::find(op).unwrap_or_else(|| panic!("{op} is not compared"));
        println!("not compared: {op}: {}", missing.reason);
    }
}

#[test]
fn the_table_and_the_exceptions_name_only_ops_that_this_torch_has() {
    let Some(answers) = oracle::answers() else { return };
    let registered = answers.registered.iter().chain(&answers.registered_on_cuda);
    let known: BTreeSet<_> =
        called(answers).into_iter().chain(registered.map(String::as_str)).collect();
    for missing in not_in_tch::NOT_IN_TCH {
        if missing.only_in.is_none_or(|version| answers.torch.starts_with(version)) {
            assert!(known.contains(missing.op), "stale in NOT_IN_TCH: {}", missing.op);
        }
        let in_table = table::entries().any(|(op, _)| *op == missing.op);
        assert!(!in_table, "in the table and in NOT_IN_TCH: {}", missing.op);
    }
    let used: BTreeSet<_> =
        called(answers).into_iter().filter_map(table::find).map(|e| e.0).collect();
    for (op, _) in table::entries() {
        assert!(used.contains(op), "no case uses {op}");
    }
}

//! The lists of CUDA: in a region on a GPU, each op gives what it gives outside of one for inputs that were cast by
//! hand as its list requires, and where Python has the same GPU, what PyTorch gives in its region.

use std::collections::{BTreeMap, BTreeSet};

use tch::{Device, Kind, Tensor};
use tch_amp::autocast::{AutocastError, Plan, Rule, RunAs};
use tch_amp::{Autocast, Error};

use crate::autocast::operations::args::Args;
use crate::autocast::operations::oracle::{self, Answers, Case, Output};
use crate::autocast::operations::{called, difference, not_in_tch, table, told, without_backends};
use testkit::programs::python_can_have_the_gpu;
use testkit::simulation::{lacks_libraries, rounds_as_the_cpu};
use testkit::ulps::Histogram;
use testkit::{gpus, skipped};

/// How a list changes the arguments of its ops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum List {
    LowerPrecisionFp,
    Fp32,
    /// Requests f32 unless the caller requests a dtype.
    Fp32SetOptDtype,
    /// Calls the overload that takes a dtype.
    Fp32AppendDtype,
    Promote,
    Banned,
}

/// The ops that AutocastCUDA registers without a macro in libtorch's header.
const WITHOUT_A_MACRO: [(&str, List); 3] = [
    ("binary_cross_entropy", List::Banned),
    ("cudnn_convolution", List::LowerPrecisionFp),
    ("cudnn_convolution_transpose", List::LowerPrecisionFp),
];

/// A question about the devices of this process.
type Question = fn() -> bool;

/// Ops that cannot run on GPUs that are not there, on which of these they cannot, and why.
const NOT_HERE: [(&str, Question, &str); 4] = [
    ("cudnn_convolution", rounds_as_the_cpu, "cuDNN is missing"),
    ("cudnn_convolution_transpose", rounds_as_the_cpu, "cuDNN is missing"),
    ("_convolution", lacks_libraries, "the case asks for cuDNN, which is missing"),
    ("nuclear_norm", lacks_libraries, "cuSOLVER is missing"),
];

/// Why an op, of which the name may be that of an overload, cannot run here.
fn why_not(op: &str) -> Option<&'static str> {
    let op = op.split('.').next().unwrap_or(op);
    let found = NOT_HERE.iter().find(|(name, is_so, _)| *name == op && is_so());
    found.map(|(_, _, reason)| *reason)
}

/// The list of `op` on CUDA.
pub fn list(answers: &Answers, op: &str) -> Option<List> {
    let without = WITHOUT_A_MACRO.iter().find(|(name, _)| *name == op).map(|(_, list)| *list);
    let name = answers.cuda_lists.get(op).map(String::as_str);
    without.or_else(|| {
        Some(match name? {
            "lower_precision_fp" => List::LowerPrecisionFp,
            "fp32" => List::Fp32,
            "fp32_set_opt_dtype" => List::Fp32SetOptDtype,
            "fp32_append_dtype" => List::Fp32AppendDtype,
            "promote" => List::Promote,
            other => panic!("unknown list {other}"),
        })
    })
}

/// The cases of the lists of CUDA that tch can call.
fn callable(answers: &Answers) -> impl Iterator<Item = (&Case, List, fn(&Args) -> table::Outputs)> {
    answers.cases.iter().filter_map(|case| {
        let (list, (_, call)) = list(answers, case.op()).zip(table::find(case.op()))?;
        Some((case, list, *call))
    })
}

/// Whether autocast casts the tensor.
fn is_eligible(tensor: &Tensor) -> bool {
    matches!(tensor.kind(), Kind::Float | Kind::Half | Kind::BFloat16)
}

/// The widest of the arguments' dtypes in a region of `dtype`, ignoring f64; an error if both half-precision dtypes
/// occur.
fn widest(args: &Args, dtype: Kind) -> Result<Kind, String> {
    let mut widest = dtype;
    for tensor in args.tensors().iter().filter(|tensor| is_eligible(tensor)) {
        widest = match (widest, tensor.kind()) {
            (Kind::Float, _) | (_, Kind::Float) => Kind::Float,
            (_, kind) if kind == dtype => dtype,
            _ => return Err("Unexpected floating ScalarType in at::autocast::prioritize".into()),
        };
    }
    Ok(widest)
}

/// The arguments for the same call outside of a region, and the dtype of its result.
fn by_hand(list: List, args: Args, dtype: Kind) -> Result<(Args, Kind), String> {
    let cast = |args: Args, kind| {
        args.map(|t| if is_eligible(t) { t.to_kind(kind) } else { t.shallow_clone() })
    };
    let first = args.tensors().iter().map(is_eligible).next().expect("every op takes a tensor");
    Ok(match list {
        List::LowerPrecisionFp => (cast(args, dtype), dtype),
        List::Fp32 => (cast(args, Kind::Float), Kind::Float),
        List::Fp32SetOptDtype | List::Fp32AppendDtype if first => {
            (args.in_kind(Kind::Float), Kind::Float)
        }
        List::Fp32SetOptDtype | List::Fp32AppendDtype => (args, Kind::Double),
        List::Promote => {
            let kind = widest(&args, dtype)?;
            (cast(args, kind), kind)
        }
        List::Banned => {
            return Err("torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.".into());
        }
    })
}

/// How the op in a region differs from the op with inputs that were cast by hand.
fn compare(
    device: Device,
    list: List,
    case: &Case,
    call: fn(&Args) -> table::Outputs,
) -> Result<(), String> {
    let args = || case.args().map(|tensor| tensor.to_device(device));
    let has_f64 = args().tensors().iter().any(|tensor| tensor.kind() == Kind::Double);
    let region = Autocast::new(device).dtype(case.dtype());
    let inside = region.run(|| call(&args())).expect("CUDA has bf16 and fp16");
    let by_hand = by_hand(list, args(), case.dtype());
    if let (Ok(outputs), Ok((_, kind))) = (&inside, &by_hand) {
        check(outputs, device, (!has_f64).then_some(*kind))?;
    }
    let (inside, outside) = (told(inside), by_hand.and_then(|(args, _)| told(call(&args))));
    let is_runnable = inside.as_ref().map_or_else(|error| is_of_autocast(error), |_| true);
    if inside == outside && is_runnable { Ok(()) } else { Err(difference(&inside, &outside)) }
}

/// Checks that the outputs are on the device and that the first of them, if it is floating-point, has the dtype.
fn check(outputs: &[Tensor], device: Device, kind: Option<Kind>) -> Result<(), String> {
    let defined = || outputs.iter().filter(|output| output.defined());
    if defined().any(|output| output.device() != device) {
        return Err("a result is on another device".into());
    }
    match (defined().next(), kind) {
        (Some(first), Some(kind)) if first.is_floating_point() && first.kind() != kind => {
            Err(format!("its result is {:?}, but its list requires {kind:?}", first.kind()))
        }
        _ => Ok(()),
    }
}

/// Whether the error comes from autocast, or from an f64 that autocast leaves alone. Otherwise the op does not run
/// here.
fn is_of_autocast(error: &str) -> bool {
    error.contains("at::autocast::prioritize")
        || error.contains("are unsafe to autocast")
        || error.starts_with("expected m1 and m2 to have the same dtype")
        || error.starts_with("expected mat1 and mat2 to have the same dtype")
}

#[test]
fn every_op_of_cudas_lists_gives_the_results_of_inputs_cast_by_hand() {
    let Some(answers) = oracle::answers() else { return };
    // Sums are split between threads, and the simulated GPUs compute on the CPU.
    tch::set_num_threads(1);
    let mut failures = Vec::new();
    for device in gpus() {
        let (mut compared, mut runs) = (BTreeSet::new(), 0);
        for (case, list, call) in callable(answers) {
            runs += 1;
            let result = compare(device, list, case, call);
            match (result, why_not(case.op())) {
                (Ok(()), None) => drop(compared.insert(case.op())),
                (Ok(()), Some(_)) => failures.push(format!("{}: stale in NOT_HERE", case.name())),
                (Err(what), None) => {
                    failures.push(format!("{} on {device:?}: {what}", case.name()))
                }
                (Err(_), Some(reason)) => println!("not compared: {}: {reason}", case.op()),
            }
        }
        println!("on {device:?}: compared {} ops in {runs} runs", compared.len());
    }
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}

/// Dtypes and shapes, without the bits.
fn types(outputs: &[Output]) -> Vec<Option<(Kind, &[i64])>> {
    let each = outputs.iter().map(Option::as_ref);
    each.map(|output| output.map(|(kind, shape, _)| (*kind, &shape[..]))).collect()
}

/// Python has chosen the same kernels for the same arguments, so that most bits are equal: most, because some kernels
/// add up in an order that differs from call to call.
const EQUAL_SHARE: f64 = 0.99;

#[test]
fn every_op_of_cudas_lists_gives_pythons_results_on_the_same_gpu() {
    if !python_can_have_the_gpu() {
        return;
    }
    let Some(answers) = oracle::answers_on_gpu() else {
        skipped("Python has no GPU here");
        return;
    };
    let gpu = Device::Cuda(0);
    let (mut failures, mut compared) = (Vec::new(), BTreeSet::new());
    let mut histograms: BTreeMap<String, Histogram> = BTreeMap::new();
    for (case, _, call) in callable(&answers) {
        let args = case.args().map(|tensor| tensor.to_device(gpu));
        let ours = Autocast::new(gpu).dtype(case.dtype()).run(|| call(&args)).unwrap();
        let (ours, theirs) = (without_backends(told(ours)), without_backends(case.expected()));
        compared.insert(case.op());
        match (&ours, &theirs) {
            (Ok(ours), Ok(theirs)) if types(ours) == types(theirs) => {
                for ((kind, _, ours), (_, _, theirs)) in
                    ours.iter().flatten().zip(theirs.iter().flatten())
                {
                    let name = format!("{kind:?} results of operators in regions");
                    histograms.entry(name).or_default().add(*kind, ours, theirs);
                }
            }
            (Err(ours), Err(theirs)) if ours == theirs => {}
            _ => failures.push(format!("{}: {}", case.name(), difference(&ours, &theirs))),
        }
    }
    for (kind, histogram) in &histograms {
        histogram.print(kind);
        if histogram.within(0) < EQUAL_SHARE {
            failures.push(format!("{kind}: too many bits differ"));
        }
    }
    assert!(compared.len() > 50, "{compared:?}");
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn every_op_registered_for_autocast_on_cuda_is_compared_or_named_with_a_reason() {
    let Some(answers) = oracle::answers() else { return };
    let called = called(answers);
    for op in &answers.registered_on_cuda {
        if let Some(missing) = not_in_tch::find(op) {
            println!("not compared: {op}: {}", missing.reason);
            continue;
        }
        assert!(list(answers, op).is_some(), "{op} is registered, but on no list of the header");
        assert!(called.contains(op.as_str()), "the oracle has no case for {op}");
        assert!(table::find(op).is_some(), "{op} is not in the table");
    }
    let registered = &answers.registered_on_cuda;
    let names = answers.cuda_lists.keys().map(String::as_str);
    for op in names.chain(WITHOUT_A_MACRO.iter().map(|(op, _)| *op)) {
        assert!(registered.iter().any(|name| name == op), "{op} is on a list, but not registered");
    }
}

/// How an op in a region with a rule for it differs from the op with inputs that were cast by hand. `None` if it cannot
/// have a rule.
fn compare_ruled(
    device: Device,
    case: &Case,
    run_as: RunAs,
    call: fn(&Args) -> table::Outputs,
) -> Option<Result<(), String>> {
    let kind = if run_as == RunAs::F32 { Kind::Float } else { case.dtype() };
    let name = case.op().split('.').next().unwrap_or_default();
    let dtype = Some(case.dtype());
    let plan = Plan { dtype, rules: vec![Rule::new(name, run_as)], ..Plan::new(device).unwrap() };
    let args = || case.args().map(|tensor| tensor.to_device(device));
    let inside = match Autocast::new(device).plan(&plan).unwrap().run(|| call(&args())) {
        Err(Error::Autocast(AutocastError::NotOverridable { .. })) => return None,
        inside => told(inside.unwrap()),
    };
    let cast = |t: &Tensor| if is_eligible(t) { t.to_kind(kind) } else { t.shallow_clone() };
    let outside = told(call(&args().map(cast)));
    Some(if inside == outside { Ok(()) } else { Err(difference(&inside, &outside)) })
}

#[test]
fn every_op_of_cudas_lists_obeys_a_plan() {
    let Some(answers) = oracle::answers() else { return };
    tch::set_num_threads(1);
    let mut failures = Vec::new();
    for device in gpus() {
        let mut compared = BTreeSet::new();
        for (case, _, call) in callable(answers) {
            for run_as in [RunAs::F32, RunAs::Half] {
                match compare_ruled(device, case, run_as, call) {
                    None => println!("not compared: {}: it cannot have a rule", case.op()),
                    Some(Ok(())) => drop(compared.insert(case.op())),
                    Some(Err(what)) => {
                        failures
                            .push(format!("{} as {run_as:?} on {device:?}: {what}", case.name()));
                    }
                }
            }
        }
        println!("on {device:?}: compared {} ops", compared.len());
        assert!(compared.len() > 50, "{compared:?}");
    }
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}

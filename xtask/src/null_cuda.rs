//! The tests on null CUDA, and the comparison of launches and synchronizations with those of the simulated GPUs.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail, ensure};
use testbench::compiled;
use testbench::null_cuda::{NullCuda, Numbers, SOURCES, check_possible};

use crate::args::Args;
use crate::process::run as show;
use crate::simulation::{Extent, Parts, run_parts};
use crate::workspace::Workspace;
use crate::{paths, simulation, steps};

/// `cargo xtask null-cuda`.
pub(crate) fn run(mut args: Args) -> Result<ExitCode> {
    let mut with_values = args.leading_flag("--values");
    let pair = args.leading_tch()?;
    with_values |= args.leading_flag("--values");
    let numbers = if with_values { Numbers::Cpu } else { Numbers::None };
    simulation::run_program(args, pair, "null-cuda --values", |workspace, command| {
        let null_cuda = NullCuda::provide(&workspace.libtorch)?;
        let program = Path::new(command.get_program()).file_name().unwrap_or_default();
        if program.to_string_lossy().starts_with("python") {
            null_cuda.apply_to_python(numbers, command);
        } else {
            null_cuda.apply(numbers, command);
        }
        Ok(())
    })
}

/// The tests that see what the host code of CUDA does.
const PARTS: [Parts; 3] = [
    ("regions", &["autocast::", "function::"]),
    ("steps", &["accumulation::", "average::", "optim::", "scaler::", "schedule::"]),
    ("devices", &[]),
];

/// What they capture is launched by replays, which no operator is asked for, so that it is not compared.
const OF_GRAPHS: Parts = ("steps", &["graph::"]);

/// Those that depend on when answers arrive run again with answers that arrive only when the host waits.
const OF_LATE_ANSWERS: Parts = ("steps", &["graph::records::", "graph::schedules::"]);

/// Two ranks on two devices, over the real ProcessGroupNCCL, and two hosts whose link is cut, where NCCL's threads may
/// read from the store forever. The other tests of `distributed` are about Gloo, and pass there, too, in seven minutes.
const OF_NCCL: Parts = ("processes", &["distributed::nccl::", "distributed::hosts::"]);

/// Tests that are left out, each with its program and the reason.
const LEFT_OUT: [(&str, &str, &str); 5] = [
    ("devices", "steps::chunks_compute_the_same_as_the_cpu", NUMBERS),
    ("devices", "muon::matrices_in_chunks_compute_the_same_as_the_cpu", NUMBERS),
    ("regions", "function::cases::", OF_THE_CPU),
    ("steps", "optim::programs::", OF_THE_CPU),
    ("steps", "scaler::programs::", OF_THE_CPU),
];

/// Tests that run on the simulated GPUs as well: those of the simulation itself, one that makes allocations fail only
/// there, and those of operators that cuDNN and cuSOLVER compute, which are missing here.
const ALSO_SIMULATED: [Parts; 2] = [
    ("devices", &["controls::", "planted::", "saved_tensors::"]),
    ("regions", &["autocast::operations::cuda::", "autocast::overrides::", "autocast::programs::"]),
];

const NUMBERS: &str = "a minute for numbers, which are the CPU's on both";
const OF_THE_CPU: &str = "a comparison with PyTorch on the CPU";

/// Operators whose launches differ from those of the simulation, and why.
const DIFFERENT: [(&str, &str); 11] = [
    ("convolution", "without cuDNN libtorch's own kernels take one image after the other"),
    ("convolution_backward", "the same"),
    (
        "_index_put_impl_",
        "host code reads how many there are, and null CUDA has no kernel that counts",
    ),
    ("bincount", "the same"),
    ("masked_select", "the same"),
    ("nonzero", "the same"),
    ("unique_dim", "the same, and it waits several times"),
    ("multinomial", "it sorts"),
    ("sort", "the kernels depend on the size, and the crate sorts for reports alone"),
    ("topk", "the same"),
    ("equal", "a third launch for many numbers"),
];

/// Operators of these that may wait several times, which the simulation counts once.
const WAITING: [&str; 2] = ["bincount", "unique_dim"];

/// Reductions of many numbers to few: blocks of threads share them, and their counters are cleared first.
const REDUCTIONS: [&str; 6] = ["all", "linalg_vector_norm", "max", "min", "norm", "sum"];

/// Whether the real host code can be run with this libtorch. If not, prints what is left out, and why.
pub(crate) fn is_possible(workspace: &Workspace) -> bool {
    let lost = "the tests on the real host code of CUDA are LEFT OUT, and with them the comparison of launches and \
                synchronizations with those of the simulated GPUs";
    simulation::or_warn(check_possible(&workspace.libtorch), lost)
}

/// Null CUDA, if it is possible. Warns otherwise.
fn provide(workspace: &Workspace) -> Result<Option<NullCuda>> {
    is_possible(workspace).then(|| NullCuda::provide(&workspace.libtorch)).transpose()
}

/// What is left for the simulated GPUs where the tests run on null CUDA as well, whose host code is the real one.
pub(crate) fn rest(workspace: &Workspace) -> Extent {
    if !is_possible(workspace) {
        return Extent::Whole;
    }
    let both =
        ALSO_SIMULATED.iter().flat_map(|(program, parts)| parts.iter().map(|it| (*program, *it)));
    let left_out = LEFT_OUT.iter().map(|(program, name, _)| (*program, *name));
    Extent::Without { parts: &PARTS, except: left_out.chain(both).collect() }
}

/// Runs the tests on null CUDA, if that is possible.
pub(crate) fn test(workspace: &Workspace) -> Result<()> {
    let Some(null_cuda) = provide(workspace)? else { return Ok(()) };
    let costs = paths::target().join("null_cuda/costs.tsv");
    if costs.exists() {
        fs::remove_file(&costs)?;
    }
    for (program, name, reason) in LEFT_OUT {
        println!("left out: {program}: {name}: {reason}");
    }
    let counted = ("NULL_CUDA_MODEL", costs.as_os_str());
    let late = ("SIMULATED_CUDA_LAG", OsStr::new("never"));
    let tests = |variable| on_null_cuda(workspace, &null_cuda, variable);
    steps::all([
        run_parts(&PARTS, &skipped(), || tests(Some(counted))),
        run_parts(&[OF_GRAPHS, OF_NCCL], &[], || tests(None)),
        run_parts(&[OF_LATE_ANSWERS], &[], || tests(Some(late))),
    ])?;
    if workspace.libtorch.python.is_some() {
        for script in ["captures.py", "iterations.py"] {
            let mut python = compiled::python(&workspace.libtorch, SOURCES, script);
            null_cuda.apply_to_python(Numbers::Cpu, &mut python);
            // torch warns about missing optional packages, which no check needs.
            show(python.env("PYTHONWARNINGS", "ignore:Failed to initialize NumPy"))?;
        }
    }
    compare(&costs)
}

/// Writes what each part that the program `devices` counts costs on null CUDA, for a run on a real GPU to be compared
/// with: a file in `folder` with the version of libtorch in its name. Without null CUDA nothing is written.
pub(crate) fn count(folder: &Path) -> Result<()> {
    let workspace = Workspace::new(None)?;
    let Some(null_cuda) = provide(&workspace)? else { return Ok(()) };
    let file = folder.join(format!("counts-{}.jsonl", workspace.libtorch.version));
    let counted = Some(("TCH_AMP_COUNTS", file.as_os_str()));
    run_parts(&[("devices", &[])], &skipped(), || {
        let mut tests = on_null_cuda(&workspace, &null_cuda, counted);
        // As the bundle has it, so that nothing is compiled again.
        tests.arg("--release");
        tests
    })
}

/// `cargo test` on null CUDA, with a variable of the environment.
fn on_null_cuda(
    workspace: &Workspace,
    null_cuda: &NullCuda,
    variable: Option<(&str, &OsStr)>,
) -> Command {
    let mut tests = simulation::on_counted_devices(workspace);
    null_cuda.apply(Numbers::Cpu, &mut tests);
    tests.envs(variable);
    tests
}

/// The names of the tests that are left out, and of those that another run tests on the CPU.
fn skipped() -> Vec<&'static str> {
    LEFT_OUT.iter().map(|(_, name, _)| *name).chain(simulation::STEPS_ON_THE_CPU).collect()
}

/// Fails if an operator had other costs than the simulation says, and says which.
fn compare(costs: &Path) -> Result<()> {
    let Compared { operators, calls, differences, known } =
        compared(&paths::read(costs).context("null CUDA has recorded no costs")?)?;
    ensure!(
        differences.is_empty(),
        "the simulated GPUs say other costs than the real host code has (testbench/simulated_cuda/costs.cpp; operator, \
         launches and waits here, launches and waits there, arguments):\n{}",
        differences.into_iter().collect::<Vec<_>>().join("\n")
    );
    let exceptions = DIFFERENT.map(|(operator, _)| operator).into_iter().chain(REDUCTIONS);
    let stale: Vec<_> = exceptions.filter(|operator| !known.contains(*operator)).collect();
    let stale = stale.join(", ");
    ensure!(stale.is_empty(), "these exceptions do not differ, and are stale: {stale}");
    println!(
        "{calls} calls of {operators} operators cost on the simulated GPUs what they cost the real host code"
    );
    for (operator, reason) in DIFFERENT {
        println!("not compared: launches of {operator}: {reason}");
    }
    let reductions = REDUCTIONS.join(", ");
    println!("not compared: a second launch of {reductions}: blocks of threads share many numbers");
    Ok(())
}

/// The result of a comparison.
#[derive(Debug, PartialEq, Eq)]
struct Compared {
    operators: usize,
    calls: u64,
    differences: BTreeSet<String>,
    /// The exceptions that did differ.
    known: BTreeSet<String>,
}

/// Compares the rows of `testbench/null_cuda/values/model.cpp`.
fn compared(table: &str) -> Result<Compared> {
    let mut calls: BTreeMap<&str, u64> = BTreeMap::new();
    let (mut differences, mut known) = (BTreeSet::new(), BTreeSet::new());
    for line in table.lines() {
        let fields: Vec<&str> = line.split('\t').collect();
        let [operator, times, launches, waits, said_launches, said_waits, arguments] = fields[..]
        else {
            bail!("a line has not seven fields: {line}");
        };
        let is_same = (launches, waits) == (said_launches, said_waits);
        let name = operator.split('.').next().unwrap_or(operator);
        let is_known = DIFFERENT.iter().any(|(known, _)| *known == name)
            || REDUCTIONS.contains(&name) && (launches, said_launches) == ("2", "1");
        if is_same {
            *calls.entry(operator).or_default() += times.parse::<u64>()?;
        } else if !is_known || (waits != said_waits && !WAITING.contains(&name)) {
            differences.insert(format!(
                "{operator}: {launches} and {waits}, {said_launches} and {said_waits}, {arguments}"
            ));
        } else {
            known.insert(name.to_owned());
        }
    }
    Ok(Compared { operators: calls.len(), calls: calls.values().sum(), differences, known })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_named_part_exists() {
        simulation::check_names(&PARTS);
        simulation::check_names(&[OF_GRAPHS, OF_LATE_ANSWERS, OF_NCCL]);
        simulation::check_names(&ALSO_SIMULATED);
        LEFT_OUT.iter().for_each(|(program, name, _)| simulation::check_name(program, name));
    }

    #[test]
    fn a_different_count_is_told_unless_its_reason_is_known() {
        let row = |name: &str, costs: [i32; 4]| {
            let [launches, waits, said_launches, said_waits] = costs;
            format!("{name}\t3\t{launches}\t{waits}\t{said_launches}\t{said_waits}\tFloat[2]\n")
        };
        let same = row("add.Tensor", [1, 0, 1, 0]) + &row("convolution", [5, 0, 1, 0]);
        let same = same + &row("sum", [2, 0, 1, 0]) + &row("add.Tensor", [0, 0, 0, 0]);
        let none = compared(&same).unwrap();
        assert_eq!((none.operators, none.calls, none.differences.len()), (1, 6, 0));
        assert_eq!(none.known, BTreeSet::from(["convolution".to_owned(), "sum".to_owned()]));
        for costs in [[2, 0, 1, 0], [1, 1, 1, 0], [0, 0, 1, 0]] {
            assert_eq!(compared(&row("mul.Tensor", costs)).unwrap().differences.len(), 1);
        }
        assert_eq!(compared(&row("convolution", [5, 1, 1, 0])).unwrap().differences.len(), 1);
        assert_eq!(compared(&row("sum", [3, 0, 1, 0])).unwrap().differences.len(), 1);
        assert!(compared("add\t1\n").is_err());
    }
}

//! `cargo xtask test`: every check, then every test.

use std::env;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::args::Args;
use crate::process::run as show;
use crate::simulation::Extent;
use crate::steps::{Beside, Steps};
use crate::versions::{PAIRS, Pair};
use crate::workspace::Workspace;
use crate::{
    fmt, fuzz, layers, links, minimum, null_cuda, package, paths, planted, recipes, sanitize,
    simulation, surface,
};

const FUZZ_SECONDS: u32 = 10;

/// Tests of whole programs, and of this crate's own files and processes. Before a release, the others see what differs
/// between the versions.
const OF_ANY_LIBTORCH: [&str; 9] = [
    "budget",
    "checkpoint_resume",
    "demo",
    "examples",
    "function_soak",
    "master_memory",
    "pairs",
    "recipe",
    "scaler_soak",
];

/// Which tests run with another version than the locked one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Selection {
    All,
    /// All but those of [`OF_ANY_LIBTORCH`].
    OfLibtorch,
}

/// `cargo xtask test`.
pub(crate) fn run(mut args: Args) -> Result<()> {
    let pair = args.tch()?;
    if let Some(name) = args.next() {
        ensure!(name == "pairs", "`{name}` is no part of the tests; `pairs` is one");
        return pairs(args, pair);
    }
    let locked = Pair::locked(&paths::root())?;
    let mut steps = Steps::default();
    if let Some(pair) = pair.filter(|pair| *pair != locked) {
        let (name, mut tests) = test_other(&mut steps, pair, Selection::All)?;
        return steps.run(&name, || show(&mut tests));
    }
    let workspace = check(&mut steps)?;
    test(&mut steps, &workspace)
}

/// `cargo xtask release-check`: what a release needs and few changes break.
pub(crate) fn check_release(args: Args) -> Result<()> {
    args.end()?;
    let locked = Pair::locked(&paths::root())?;
    let mut steps = Steps::default();
    let mut beside = Vec::new();
    for pair in PAIRS.into_iter().filter(|pair| *pair != locked) {
        let (name, tests) = test_other(&mut steps, pair, Selection::OfLibtorch)?;
        beside.push(Beside::start(&name, [tests])?);
    }
    let checked = check_alone(&mut steps);
    // Also after a check that has failed: nothing goes on in the background, and one run shows both.
    let finished: Vec<_> = beside.into_iter().map(Beside::finish).collect();
    checked?;
    finished.into_iter().collect()
}

/// The part of [`check_release`] with the locked version.
fn check_alone(steps: &mut Steps) -> Result<()> {
    steps.run("minimum Rust version", minimum::check_rust)?;
    steps.run(
        "the packed crate with the oldest dependencies, and its documentation",
        package::check_builds,
    )?;
    let workspace = steps.run("libtorch", || Workspace::announced(None))?;
    if cfg!(target_os = "linux") {
        steps.run("fuzzing, briefly", || fuzz::checkpoints(&workspace, FUZZ_SECONDS))?;
    }
    steps.run("copies that arrive at another time", || simulation::test_lags(&workspace))
}

/// `cargo xtask test pairs SECONDS`: tries random programs of two abilities for this time.
fn pairs(mut args: Args, pair: Option<Pair>) -> Result<()> {
    let seconds = args.next().unwrap_or_else(|| "600".to_owned());
    args.end()?;
    let seconds: u32 = seconds.parse().context("the seconds of `pairs` must be a whole number")?;
    let workspace = Workspace::announced(pair)?;
    let mut tests = workspace.cargo_test();
    tests.args(["--test", "pairs", "--", "--nocapture"]);
    show(tests.env("TCH_AMP_PAIRS_SECONDS", seconds.to_string()))
}

/// Runs the tests with another tch than the locked one, without the checks that do not depend on it: neither late copies
/// nor the examples in the documentation do. Returns the name and the command of those that did not run on simulated
/// GPUs: they mostly wait for processes and for time.
fn test_other(steps: &mut Steps, pair: Pair, selection: Selection) -> Result<(String, Command)> {
    let name = format!("libtorch for tch {}", pair.tch);
    let workspace = steps.run(&name, || Workspace::announced(Some(pair)))?;
    let with = format!("with tch {}", pair.tch);
    let simulated = steps.run(&format!("tests {with} on simulated GPUs"), || {
        simulation::test(&workspace, Extent::OfKernels)
    })?;
    null_cuda::is_possible(&workspace);
    // Regions are tested without a GPU as well: there they are refused on one.
    let remains = |name: &str| {
        let has_run = simulated && simulation::is_of_kernels(name) && name != "autocast";
        !has_run && (selection == Selection::All || !OF_ANY_LIBTORCH.contains(&name))
    };
    let mut tests = on_cpu(&workspace, remains)?;
    simulation::fewer_programs(&mut tests);
    tests.arg("--lib").env("TCH_AMP_SHORT", "1");
    Ok((format!("cargo test {with}"), tests))
}

/// The integration tests that `which` selects, on the CPU.
fn on_cpu(workspace: &Workspace, which: impl Fn(&str) -> bool) -> Result<Command> {
    workspace.warn_without_python();
    let mut tests = workspace.cargo_test();
    simulation::add(&mut tests, which)?;
    Ok(tests)
}

/// The checks, most of which compile and link nothing.
fn check(steps: &mut Steps) -> Result<Workspace> {
    steps.run("format", fmt::check_rust_format)?;
    steps.run("format of the C++", fmt::check_cxx_format)?;
    steps.run("tests of torch-files and run-report", package::test_members)?;
    if cfg!(target_os = "linux") {
        steps.run("fuzzing of torch-files, briefly", || fuzz::files(FUZZ_SECONDS))?;
    }
    steps.run("links between the pages", links::check)?;
    steps.run("layers of the source", layers::check)?;
    steps.run("planted faults", planted::check)?;
    steps.run("contents of the package", package::check_contents)?;
    steps.run("clippy", package::lint)?;
    steps.run("copies of the recipes", recipes::check)?;
    steps.run("surface", surface::check)?;
    steps.run("documentation", package::check_documentation)?;
    let workspace = steps.run("libtorch", || Workspace::announced(None))?;
    steps.run("torch-files beside PyTorch", || {
        show(workspace.cargo("test").args(["--package", "torch-files", "--lib", "oracle::"]))
    })?;
    steps.run("C++ without warnings", || sanitize::compile(&workspace))?;
    steps.run("tests of xtask", || show(workspace.cargo("test").args(["--package", "xtask"])))?;
    Ok(workspace)
}

/// Every test. Those on counted devices use one core, since they count what a whole process does, one after the other,
/// for about as long as all others use another one.
fn test(steps: &mut Steps, workspace: &Workspace) -> Result<()> {
    // Clippy has checked the examples, which no test runs as programs of their own.
    let mut tests = on_cpu(workspace, |_| true)?;
    tests.arg("--lib");
    let mut sanitized = Command::new(env::current_exe()?);
    sanitized.arg("sanitize");
    let mut examples = workspace.cargo_test();
    examples.arg("--doc");
    let others = Beside::start("all other tests", [tests, sanitized, examples])?;
    let on_devices = test_on_devices(steps, workspace);
    let others = others.finish();
    on_devices?;
    others
}

fn test_on_devices(steps: &mut Steps, workspace: &Workspace) -> Result<()> {
    let simulated =
        steps.run("tests on simulated GPUs", || simulation::test(workspace, Extent::Whole));
    steps.run("tests on the real host code of CUDA", || null_cuda::test(workspace))?;
    simulated.map(drop)
}

//! `cargo xtask test`: every check, then every test.

use anyhow::{Result, ensure};

use crate::args::Args;
use crate::on_simulation::Extent;
use crate::process::run as show;
use crate::steps::{Beside, Steps};
use crate::versions::{PAIRS, Pair};
use crate::workspace::{self, Workspace};
use crate::{fuzz, layers, links, msrv, on_simulation, package, recipes, sanitize, surface, tools};

const FUZZ_SECONDS: u32 = 10;

const TESTS: [&str; 2] = ["--lib", "--tests"];

/// `cargo xtask test`.
pub(crate) fn run(mut args: Args) -> Result<()> {
    let all = args.flag("--all-versions");
    let pair = args.tch()?;
    args.end()?;
    ensure!(!all || pair.is_none(), "`--all-versions` and `--tch` exclude each other");
    let locked = Pair::locked(&workspace::root())?;
    let mut steps = Steps::default();
    if let Some(pair) = pair.filter(|pair| *pair != locked) {
        return test_other(&mut steps, pair)?.finish();
    }
    let others = PAIRS.into_iter().filter(|pair| all && *pair != locked);
    let others: Vec<_> = others.map(|pair| test_other(&mut steps, pair)).collect::<Result<_>>()?;
    let workspace = check(&mut steps)?;
    others.into_iter().try_for_each(Beside::finish)?;
    test(&mut steps, &workspace)
}

/// `cargo xtask ci`.
pub(crate) fn run_all(args: Args) -> Result<()> {
    args.end()?;
    run(Args::new(["--all-versions".to_owned()]))
}

/// Runs the tests with another tch than the locked one, without the checks that do not depend on it: neither late copies
/// nor the examples in the documentation do. What remains to be finished are those that no simulated GPU has run: they
/// wait for processes and for time more than they compute.
fn test_other(steps: &mut Steps, pair: Pair) -> Result<Beside> {
    let name = format!("libtorch for tch {}", pair.tch);
    let workspace = steps.run(&name, || Workspace::announced(Some(pair)))?;
    let with = format!("with tch {}", pair.tch);
    let simulated = steps.run(&format!("tests {with} on simulated GPUs"), || {
        on_simulation::test(&workspace, Extent::OfKernels)
    })?;
    workspace.warn_without_python();
    let mut tests = workspace.cargo_full("test");
    match simulated {
        true => on_simulation::add_others(tests.arg("--lib"))?,
        false => drop(tests.args(TESTS)),
    }
    let name = format!("cargo test {with}");
    Beside::start(&name, &format!("tests-{}.log", pair.tch), tests.env("TCH_AMP_SHORT", "1"))
}

/// The checks, most of which compile and link nothing.
fn check(steps: &mut Steps) -> Result<Workspace> {
    steps.run("format", tools::check_rust_format)?;
    steps.run("format of the C++", tools::check_cxx_format)?;
    steps.run("links between the pages", links::check)?;
    steps.run("layers of the source", layers::check)?;
    steps.run("minimum Rust version", msrv::check)?;
    steps.run("contents of the package", package::check_contents)?;
    steps.run(
        "the packed crate with the oldest dependencies, and its documentation",
        package::check_builds,
    )?;
    steps.run("copies of the recipes", recipes::check)?;
    steps.run("surface", surface::check)?;
    steps.run("documentation", package::check_documentation)?;
    let workspace = steps.run("libtorch", || Workspace::announced(None))?;
    steps.run("C++ without warnings", || sanitize::compile(&workspace))?;
    steps.run("tests of xtask", || show(workspace.cargo("test").args(["--package", "xtask"])))?;
    if cfg!(target_os = "linux") {
        steps.run("fuzzing, briefly", || fuzz::fuzz(&workspace, FUZZ_SECONDS))?;
    }
    steps.run("clippy", || {
        let mut clippy = workspace.cargo_full("clippy");
        show(clippy.args(["--workspace", "--all-targets", "--", "-D", "warnings"]))
    })?;
    Ok(workspace)
}

fn test(steps: &mut Steps, workspace: &Workspace) -> Result<()> {
    steps.run("tests under sanitizers", || sanitize::sanitize(workspace))?;
    steps.run("tests on simulated GPUs", || on_simulation::test(workspace, Extent::Whole))?;
    // Clippy has compiled the examples, which no test runs as programs of their own.
    steps.run("cargo test", || {
        workspace.warn_without_python();
        show(workspace.cargo_full("test").args(TESTS))
    })?;
    steps.run("examples in the documentation", || show(workspace.cargo_full("test").arg("--doc")))
}

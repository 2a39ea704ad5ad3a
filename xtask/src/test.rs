//! `cargo xtask test`: every check, then every test.

use anyhow::{Result, ensure};

use crate::args::Args;
use crate::on_simulation::Extent;
use crate::process::run as show;
use crate::steps::Steps;
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
        return test_only(&mut steps, pair);
    }
    if all {
        for pair in PAIRS.into_iter().filter(|pair| *pair != locked) {
            test_only(&mut steps, pair)?;
        }
    }
    check_and_test(&mut steps)
}

/// `cargo xtask ci`.
pub(crate) fn run_all(args: Args) -> Result<()> {
    args.end()?;
    run(Args::new(["--all-versions".to_owned()]))
}

/// Runs the tests with another tch than the locked one, without the checks that do not depend on it: neither late copies
/// nor the examples in the documentation do.
fn test_only(steps: &mut Steps, pair: Pair) -> Result<()> {
    let name = format!("libtorch for tch {}", pair.tch);
    let workspace = steps.run(&name, || Workspace::announced(Some(pair)))?;
    let with = format!("with tch {}", pair.tch);
    steps.run(&format!("tests {with} on simulated GPUs"), || {
        on_simulation::test(&workspace, Extent::OfKernels)
    })?;
    steps.run(&format!("cargo test {with}"), || {
        workspace.warn_without_python();
        show(workspace.cargo_full("test").args(TESTS).env("TCH_AMP_SHORT", "1"))
    })
}

fn check_and_test(steps: &mut Steps) -> Result<()> {
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
    let workspace = steps.run("libtorch", || Workspace::announced(None))?;
    steps.run("C++ without warnings", || sanitize::compile(&workspace))?;
    steps.run("tests under sanitizers", || sanitize::sanitize(&workspace))?;
    steps.run("clippy", || {
        let mut clippy = workspace.cargo_full("clippy");
        show(clippy.args(["--workspace", "--all-targets", "--", "-D", "warnings"]))
    })?;
    steps.run("documentation", || {
        show(workspace.cargo_full("doc").arg("--no-deps").env("RUSTDOCFLAGS", "-D warnings"))
    })?;
    steps.run("tests of xtask", || show(workspace.cargo("test").args(["--package", "xtask"])))?;
    if cfg!(target_os = "linux") {
        steps.run("fuzzing, briefly", || fuzz::fuzz(&workspace, FUZZ_SECONDS))?;
    }
    steps.run("tests on simulated GPUs", || on_simulation::test(&workspace, Extent::Whole))?;
    // Clippy has compiled the examples, which no test runs as programs of their own.
    steps.run("cargo test", || {
        workspace.warn_without_python();
        show(workspace.cargo_full("test").args(TESTS))
    })?;
    steps.run("examples in the documentation", || show(workspace.cargo_full("test").arg("--doc")))
}

//! `cargo xtask test`: every check, then every test.

use std::cell::OnceCell;
use std::env;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::args::Args;
use crate::process::run as show;
use crate::simulation::{Extent, Parts};
use crate::steps::{self, Beside, Commands, Steps};
use crate::versions::{PAIRS, Pair};
use crate::workspace::Workspace;
use crate::{
    fmt, fuzz, layers, links, minimum, null_cuda, package, paths, planted, recipes, sanitize,
    simulation, surface,
};

const FUZZ_SECONDS: u32 = 10;

/// Tests of whole programs, and of this crate's own files and processes. Before a release, the others see what differs
/// between the versions.
const OF_ANY_LIBTORCH: [Parts; 6] = [
    ("abi", &[]),
    ("master_memory", &[]),
    ("processes", &["demo::", "examples::", "recipe::", "resume::"]),
    ("reports", &["budget::"]),
    ("soak", &[]),
    ("steps", &["pairs::"]),
];

/// How many random programs a release is tested with.
const MORE_PROGRAMS: [(&str, &str); 3] = [
    ("TCH_AMP_PROGRAMS", "10000"),
    ("TCH_AMP_OPTIM_PROGRAMS", "5000"),
    ("TCH_AMP_STATE_WALKS", "250"),
];

/// Which tests run with another version than the locked one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Selection {
    All,
    /// All but those of [`OF_ANY_LIBTORCH`].
    OfLibtorch,
}

/// A part of `cargo xtask test`, which can also run alone.
struct Stage {
    /// Its name in `cargo xtask test NAME`.
    name: &'static str,
    /// Its heading.
    about: &'static str,
    work: Work,
}

enum Work {
    /// Needs no libtorch.
    Check(fn() -> Result<()>),
    /// Is done with libtorch.
    Libtorch(fn(&Workspace) -> Result<()>),
    /// Counts what a whole process does on devices, one test after the other, on one core.
    OnDevices(fn(&Workspace) -> Result<()>),
    /// Runs on another core beside those on devices.
    Beside(fn(&Workspace) -> Result<Commands>),
}

/// The stages in their order: first what costs little and fails often.
const STAGES: &[Stage] = &[
    check("format", "format", fmt::check_rust_format),
    check("cxx-format", "format of the C++", fmt::check_cxx_format),
    check("links", "links between the pages", links::check),
    check("layers", "layers of the source", layers::check),
    check("patches", "planted faults apply", planted::check),
    check("package", "contents of the package", package::check_contents),
    check("clippy", "clippy", package::lint),
    check("members", "tests of torch-files and run-report", package::test_members),
    with_libtorch("lib", "tests of private code", |workspace| {
        // Of the crate and of the recipes.
        show(workspace.cargo_test().arg("--lib"))
    }),
    with_libtorch("xtask", "tests of xtask and testbench", |workspace| {
        show(workspace.cargo("test").args(["--package", "xtask", "--package", "testbench"]))
    }),
    check("surface", "surface", surface::check),
    check("documentation", "documentation", package::check_documentation),
    check("recipes", "copies of the recipes", recipes::check),
    check("fuzz", "fuzzing of torch-files, briefly", || match cfg!(target_os = "linux") {
        true => fuzz::files(FUZZ_SECONDS),
        false => Ok(()),
    }),
    with_libtorch("files", "torch-files beside PyTorch", |workspace| {
        show(workspace.cargo("test").args(["--package", "torch-files", "--lib", "oracle::"]))
    }),
    with_libtorch("cxx", "C++ without warnings", sanitize::compile),
    on_devices("simulated", "tests on simulated GPUs", |workspace| {
        let extent = match null_cuda::is_possible(workspace) {
            true => null_cuda::rest(),
            false => Extent::Whole,
        };
        simulation::test(workspace, extent).map(drop)
    }),
    on_devices("null-cuda", "tests on the real host code of CUDA", null_cuda::test),
    beside("sanitize", "tests under sanitizers", |_| {
        let mut sanitized = Command::new(env::current_exe()?);
        sanitized.arg("sanitize");
        Ok(alone("sanitize", sanitized))
    }),
    beside("cpu", "tests on the CPU", |workspace| {
        let of_program = |program: String| {
            let mut tests = on_cpu(workspace);
            tests.args(["--test", &program]);
            (format!("cpu: {program}"), tests)
        };
        Ok(simulation::programs()?.into_iter().map(of_program).collect())
    }),
    beside("hooks", "optimizers and pairs with hooks around what autograd saves", |workspace| {
        let mut tests = with_hooks(workspace);
        tests.args(["--test", "steps", "--", "optim::", "pairs::"]);
        Ok(alone("hooks", tests))
    }),
    beside("doc-tests", "examples in the documentation", |workspace| {
        // Clippy has checked the examples of the repository, which no test runs as programs of their own.
        let mut examples = workspace.cargo_test();
        examples.arg("--doc");
        Ok(alone("doc-tests", examples))
    }),
];

const fn check(name: &'static str, about: &'static str, work: fn() -> Result<()>) -> Stage {
    Stage { name, about, work: Work::Check(work) }
}

const fn with_libtorch(
    name: &'static str,
    about: &'static str,
    work: fn(&Workspace) -> Result<()>,
) -> Stage {
    Stage { name, about, work: Work::Libtorch(work) }
}

const fn on_devices(
    name: &'static str,
    about: &'static str,
    work: fn(&Workspace) -> Result<()>,
) -> Stage {
    Stage { name, about, work: Work::OnDevices(work) }
}

const fn beside(
    name: &'static str,
    about: &'static str,
    work: fn(&Workspace) -> Result<Commands>,
) -> Stage {
    Stage { name, about, work: Work::Beside(work) }
}

/// The only command of a stage.
fn alone(stage: &str, command: Command) -> Commands {
    vec![(stage.to_owned(), command)]
}

/// The libtorch of a run, provided when it is first needed.
#[derive(Default)]
struct Provided(OnceCell<Workspace>);

impl Provided {
    fn get(&self) -> Result<&Workspace> {
        if self.0.get().is_none() {
            // Only this thread sets it.
            let _set = self.0.set(Workspace::announced(None)?);
        }
        self.0.get().context("libtorch is not there")
    }
}

impl Stage {
    fn run(&self, libtorch: &Provided) -> Result<()> {
        match self.work {
            Work::Check(work) => work(),
            Work::Libtorch(work) | Work::OnDevices(work) => work(libtorch.get()?),
            Work::Beside(commands) => {
                let commands = commands(libtorch.get()?)?;
                steps::all(commands.into_iter().map(|(_, mut command)| show(&mut command)))
            }
        }
    }

    /// What is shown for the stage, with its name, by which it runs again.
    fn title(&self) -> String {
        if self.name == self.about {
            return self.name.to_owned();
        }
        format!("{}: {}", self.name, self.about)
    }
}

/// `cargo xtask test`.
pub(crate) fn run(mut args: Args) -> Result<()> {
    let pair = args.tch()?;
    let name = args.next();
    if name.as_deref() == Some("pairs") {
        return pairs(args, pair);
    }
    args.end()?;
    let locked = Pair::locked(&paths::root())?;
    let other = pair.filter(|pair| *pair != locked);
    match (name, other) {
        (Some(name), None) => one(&name),
        (Some(name), Some(_)) => bail!("the stage `{name}` runs with the tch of Cargo.lock alone"),
        (None, Some(pair)) => {
            let mut steps = Steps::default();
            for (name, mut tests) in test_other(&mut steps, pair, Selection::All)? {
                steps.run(&name, || show(&mut tests))?;
            }
            Ok(())
        }
        (None, None) => all(),
    }
}

/// Runs one stage.
fn one(name: &str) -> Result<()> {
    let stage = STAGES.iter().find(|stage| stage.name == name).with_context(|| {
        let names: Vec<_> = STAGES.iter().map(|stage| stage.name).collect();
        format!("there is no stage `{name}`; there are {} and pairs", names.join(", "))
    })?;
    stage.run(&Provided::default())
}

/// Runs every stage: those on devices, and all others beside them; whichever of the two ends first helps the other.
fn all() -> Result<()> {
    let (libtorch, mut steps) = (Provided::default(), Steps::kept_in("stages.txt"));
    let mut run = |stage: &Stage| {
        let again = || format!("see it again with `cargo xtask test {}`", stage.name);
        steps.run(&stage.title(), || stage.run(&libtorch)).with_context(again)
    };
    let is_on_devices = |stage: &&Stage| matches!(stage.work, Work::OnDevices(_));
    let is_later = |stage: &&Stage| is_on_devices(stage) || matches!(stage.work, Work::Beside(_));
    let (later, first): (Vec<_>, Vec<_>) = STAGES.iter().partition(is_later);
    first.into_iter().try_for_each(&mut run)?;
    let mut commands = Vec::new();
    for stage in &later {
        if let Work::Beside(of_stage) = stage.work {
            commands.extend(of_stage(libtorch.get()?)?);
        }
    }
    let others = Beside::start("all other tests", commands)?;
    // Also after one that has failed: nothing goes on in the background, and one run shows both.
    let on_devices = later.iter().copied().filter(is_on_devices).map(&mut run);
    let mut results: Vec<_> = on_devices.collect();
    let again = "see a stage again with `cargo xtask test` and the first word of its name";
    results.push(others.share(&mut steps).context(again));
    results.push(others.finish(&mut steps).context(again));
    steps::all(results)
}

/// `cargo xtask release-check`: what a release needs and few changes break.
pub(crate) fn check_release(args: Args) -> Result<()> {
    args.end()?;
    let locked = Pair::locked(&paths::root())?;
    let mut steps = Steps::default();
    let mut beside = Vec::new();
    for pair in PAIRS.into_iter().filter(|pair| *pair != locked) {
        let tests = test_other(&mut steps, pair, Selection::OfLibtorch)?;
        beside.push(Beside::start(&format!("tests with tch {}", pair.tch), tests)?);
    }
    let checked = check_alone(&mut steps);
    // Also after a check that has failed: nothing goes on in the background, and one run shows both.
    let finished: Vec<_> = beside.into_iter().map(|tests| tests.finish(&mut steps)).collect();
    checked?;
    steps::all(finished)
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
    steps.run("five times as many random programs", || {
        let mut tests = on_cpu(&workspace);
        for (name, count) in MORE_PROGRAMS {
            tests.env(name, count);
        }
        show(tests.args(["--test", "steps", "--test", "regions", "--", "programs::"]))
    })?;
    steps.run("tests with hooks around what autograd saves", || {
        show(with_hooks(&workspace).args(["--test", "*"]))
    })?;
    steps.run("all tests on simulated GPUs", || simulation::test(&workspace, Extent::Whole))?;
    steps.run("copies that arrive at another time", || simulation::test_lags(&workspace))
}

/// `cargo xtask test pairs SECONDS`: tries random programs of two abilities for this time.
fn pairs(mut args: Args, pair: Option<Pair>) -> Result<()> {
    let seconds = args.next().unwrap_or_else(|| "600".to_owned());
    args.end()?;
    let seconds: u32 = seconds.parse().context("the seconds of `pairs` must be a whole number")?;
    let workspace = Workspace::announced(pair)?;
    let mut tests = workspace.cargo_test();
    tests.args(["--test", "steps", "--", "pairs::", "--nocapture"]);
    show(tests.env("TCH_AMP_PAIRS_SECONDS", seconds.to_string()))
}

/// Runs the tests with another tch than the locked one, without the checks that do not depend on it: neither late
/// copies nor the examples in the documentation do. Returns the commands of those that did not run on simulated GPUs:
/// they mostly wait for processes and for time.
fn test_other(steps: &mut Steps, pair: Pair, selection: Selection) -> Result<Commands> {
    let name = format!("libtorch for tch {}", pair.tch);
    let workspace = steps.run(&name, || Workspace::announced(Some(pair)))?;
    let with = format!("with tch {}", pair.tch);
    let simulated = steps.run(&format!("tests {with} on simulated GPUs"), || {
        simulation::test(&workspace, Extent::OfKernels)
    })?;
    null_cuda::is_possible(&workspace);
    let mut left_out = Vec::new();
    if selection == Selection::OfLibtorch {
        left_out.extend(OF_ANY_LIBTORCH);
    }
    if simulated {
        left_out.extend(simulation::OF_KERNELS);
    }
    let mut lib = workspace.cargo_test();
    lib.arg("--lib");
    let mut commands = vec![(format!("private code {with}"), lib)];
    for program in simulation::programs()? {
        let own = left_out.iter().filter(|(name, _)| *name == program);
        if own.clone().any(|(_, parts)| parts.is_empty()) {
            continue;
        }
        // Regions are tested without a GPU as well: there they are refused on one.
        let parts = own.flat_map(|(_, parts)| *parts).filter(|part| **part != "autocast::");
        let mut tests = on_cpu(&workspace);
        simulation::fewer_programs(&mut tests);
        tests.env("TCH_AMP_SHORT", "1").args(["--test", &program, "--"]);
        tests.args(parts.flat_map(|part| ["--skip", part]));
        commands.push((format!("{program} {with}"), tests));
    }
    Ok(commands)
}

/// `cargo test` on the CPU.
///
/// cargo-nextest would start a process for each test. One that loads libtorch takes a second of processor time before
/// it begins: 40 minutes for all of them.
fn on_cpu(workspace: &Workspace) -> Command {
    workspace.warn_without_python();
    let mut tests = workspace.cargo_test();
    // One run shows all that fails: the next one would take as long.
    tests.arg("--no-fail-fast");
    tests
}

/// `cargo test` on the CPU, where all that autograd saves goes through hooks that change nothing.
fn with_hooks(workspace: &Workspace) -> Command {
    let mut tests = on_cpu(workspace);
    tests.env("TCH_AMP_SAVED_TENSORS", "as-given");
    tests
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_named_test_exists() {
        simulation::check_names(&OF_ANY_LIBTORCH);
    }

    #[test]
    fn every_stage_has_a_name_of_its_own_and_an_unknown_one_is_refused() {
        let names: std::collections::BTreeSet<_> = STAGES.iter().map(|stage| stage.name).collect();
        assert_eq!(names.len(), STAGES.len());
        assert!(!names.contains("pairs"), "it is not among those that every run has");
        let refused = one("no-such-stage").unwrap_err().to_string();
        assert!(
            refused.contains("format, cxx-format, ") && refused.contains(" and pairs"),
            "{refused}"
        );
    }
}

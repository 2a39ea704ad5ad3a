//! `cargo xtask test`: every check, then every test.

use std::cell::OnceCell;
use std::env;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::args::Args;
use crate::simulation::{Extent, Parts};
use crate::steps::{self, Commands, Lane, Steps, show};
use crate::versions::Pair;
use crate::workspace::Workspace;
use crate::{
    fmt, fuzz, layers, links, minimum, null_cuda, package, planted, recipes, sanitize, simulation,
    surface,
};

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

/// The program whose tests start processes.
const PROCESSES: &str = "processes";

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
    /// Runs beside both, because it waits most of the time.
    Waits(fn(&Workspace) -> Result<Commands>),
}

use Work::{Beside, Check, Libtorch, OnDevices, Waits};

const fn stage(name: &'static str, about: &'static str, work: Work) -> Stage {
    Stage { name, about, work }
}

/// The stages in their order: first what costs little and fails often.
const STAGES: &[Stage] = &[
    stage("format", "format", Check(fmt::check_rust_format)),
    stage("cxx-format", "format of the C++", Check(fmt::check_cxx_format)),
    stage("links", "links between the pages", Check(links::check)),
    stage("layers", "layers of the source", Check(layers::check)),
    stage("patches", "planted faults apply", Check(planted::check)),
    stage("package", "contents of the package", Check(package::check_contents)),
    stage("clippy", "clippy", Check(package::lint)),
    stage("members", "tests of torch-files and run-report", Check(package::test_members)),
    stage("lib", "tests of private code", Libtorch(test_private_code)),
    stage("xtask", "tests of xtask and testbench", Libtorch(test_xtask)),
    stage("surface", "surface", Check(surface::check)),
    stage("documentation", "documentation", Check(package::check_documentation)),
    stage("recipes", "copies of the recipes", Check(recipes::check)),
    stage("fuzz", "fuzzing of torch-files, briefly", Check(fuzz::files_briefly)),
    stage("files", "torch-files beside PyTorch", Libtorch(compare_files)),
    stage("cxx", "C++ without warnings", Libtorch(sanitize::compile)),
    stage("simulated", "tests on simulated GPUs", OnDevices(test_on_simulated)),
    stage("null-cuda", "tests on the real host code of CUDA", OnDevices(null_cuda::test)),
    stage("sanitize", "tests under sanitizers", Beside(sanitized)),
    stage("cpu", "remaining tests on the CPU", Beside(on_the_cpu)),
    stage(PROCESSES, "tests of several processes", Waits(processes)),
    stage("hooks", "optimizers and pairs with hooks around what autograd saves", Beside(hooks)),
    stage("doc-tests", "examples in the documentation", Beside(examples)),
];

/// Of the crate and of the recipes.
fn test_private_code(workspace: &Workspace) -> Result<()> {
    show(&mut workspace.test("--lib"))
}

fn test_xtask(workspace: &Workspace) -> Result<()> {
    show(&mut workspace.cargo("test --package xtask --package testbench"))
}

fn compare_files(workspace: &Workspace) -> Result<()> {
    show(&mut workspace.cargo("test --package torch-files --lib oracle::"))
}

fn test_on_simulated(workspace: &Workspace) -> Result<()> {
    simulation::test(workspace, null_cuda::rest(workspace)).map(drop)
}

fn sanitized(_: &Workspace) -> Result<Commands> {
    let mut sanitized = Command::new(env::current_exe()?);
    sanitized.arg("sanitize");
    Ok(vec![("sanitize".to_owned(), sanitized)])
}

fn on_the_cpu(workspace: &Workspace) -> Result<Commands> {
    let tests = simulation::beside_devices(workspace)?.into_iter();
    let tests = tests.filter(|(name, _)| name != PROCESSES);
    Ok(tests.map(|(name, words)| (format!("cpu: {name}"), on_cpu(workspace, &words))).collect())
}

fn processes(workspace: &Workspace) -> Result<Commands> {
    let mut tests = on_cpu(workspace, &format!("--test {PROCESSES}"));
    simulation::without_devices(workspace, &mut tests)?;
    Ok(vec![(PROCESSES.to_owned(), tests)])
}

fn hooks(workspace: &Workspace) -> Result<Commands> {
    let mut tests = with_hooks(workspace, "--test steps -- optim:: pairs::");
    // These run no backward pass, or very many.
    tests.args(simulation::STEPS_ON_THE_CPU.into_iter().flat_map(|name| ["--skip", name]));
    tests.envs(simulation::FEWER_PROGRAMS);
    Ok(vec![("hooks".to_owned(), tests)])
}

/// Clippy has checked the examples of the repository, which no test runs as programs of their own.
fn examples(workspace: &Workspace) -> Result<Commands> {
    let mut tests = workspace.test("--doc");
    simulation::without_devices(workspace, &mut tests)?;
    Ok(vec![("doc-tests".to_owned(), tests)])
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
            Check(work) => work(),
            Libtorch(work) | OnDevices(work) => work(libtorch.get()?),
            Beside(commands) | Waits(commands) => {
                let commands = commands(libtorch.get()?)?;
                steps::all(commands.into_iter().map(|(_, mut command)| show(&mut command)))
            }
        }
    }

    /// What is shown for the stage, with its name, by which it runs again.
    fn title(&self) -> String {
        match self.name == self.about {
            true => self.name.to_owned(),
            false => format!("{}: {}", self.name, self.about),
        }
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
    let locked = Pair::locked()?;
    match (name, pair.filter(|pair| *pair != locked)) {
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

/// Runs every stage: those on devices, and all others beside them; whichever of the two ends first helps the other. What
/// waits most of the time runs beside both.
fn all() -> Result<()> {
    let (libtorch, mut steps) = (Provided::default(), Steps::kept_in("stages.txt"));
    let mut run = |stage: &Stage| {
        let again = || format!("see it again with `cargo xtask test {}`", stage.name);
        steps.run(&stage.title(), || stage.run(&libtorch)).with_context(again)
    };
    let (mut on_devices, mut beside, mut waiting) = (Vec::new(), Vec::new(), Vec::new());
    for stage in STAGES {
        match stage.work {
            Check(_) | Libtorch(_) => run(stage)?,
            OnDevices(_) => on_devices.push(stage),
            Beside(commands) => beside.extend(commands(libtorch.get()?)?),
            Waits(commands) => waiting.extend(commands(libtorch.get()?)?),
        }
    }
    let waiting = Lane::start("tests of several processes", waiting)?;
    let others = Lane::start("all other tests", beside)?;
    // Also after one that has failed: nothing goes on in the background, and one run shows all.
    let mut results: Vec<_> = on_devices.into_iter().map(&mut run).collect();
    let again = "see a stage again with `cargo xtask test` and the first word of its name";
    results.push(others.share(&mut steps).context(again));
    results.push(steps::finish([waiting, others], &mut steps).context(again));
    steps::all(results)
}

/// `cargo xtask release-check`: what a release needs and few changes break.
pub(crate) fn check_release(args: Args) -> Result<()> {
    args.end()?;
    let mut steps = Steps::default();
    let mut beside = Vec::new();
    for pair in Pair::others()? {
        let tests = test_other(&mut steps, pair, Selection::OfLibtorch)?;
        beside.push(Lane::start(&format!("tests with tch {}", pair.tch), tests)?);
    }
    let checked = check_alone(&mut steps);
    // Also after a check that has failed: nothing goes on in the background, and one run shows both.
    let finished = steps::finish(beside, &mut steps);
    checked?;
    finished
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
        steps.run("fuzzing, briefly", || fuzz::checkpoints(&workspace, fuzz::BRIEFLY))?;
    }
    steps.run("five times as many random programs", || {
        show(on_cpu(&workspace, "--test steps --test regions -- programs::").envs(MORE_PROGRAMS))
    })?;
    steps.run("tests with hooks around what autograd saves", || {
        show(&mut with_hooks(&workspace, "--test *"))
    })?;
    steps.run("all tests on simulated GPUs", || simulation::test(&workspace, Extent::Whole))?;
    steps.run("copies that arrive at another time", || simulation::test_lags(&workspace))
}

/// `cargo xtask test pairs SECONDS`: tries random programs of two abilities for this time.
fn pairs(mut args: Args, pair: Option<Pair>) -> Result<()> {
    let seconds = args.next().unwrap_or_else(|| "600".to_owned());
    args.end()?;
    let seconds: u32 = seconds.parse().context("the seconds of `pairs` must be a whole number")?;
    let mut tests = Workspace::announced(pair)?.test("--test steps -- pairs:: --nocapture");
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
    let mut commands = vec![(format!("private code {with}"), workspace.test("--lib"))];
    for program in simulation::programs()? {
        let own = left_out.iter().filter(|(name, _)| *name == program);
        if own.clone().any(|(_, parts)| parts.is_empty()) {
            continue;
        }
        // Regions are tested without a GPU as well: there they are refused on one.
        let parts = own.flat_map(|(_, parts)| *parts).filter(|part| **part != "autocast::");
        let mut tests = on_cpu(&workspace, &format!("--test {program} --"));
        tests.args(parts.flat_map(|part| ["--skip", part]));
        tests.envs(simulation::FEWER_PROGRAMS).env("TCH_AMP_SHORT", "1");
        commands.push((format!("{program} {with}"), tests));
    }
    Ok(commands)
}

/// `cargo test` on the CPU, also after a test that has failed: one run shows all that fail, and the next one would take
/// as long.
///
/// cargo-nextest would start a process for each test. One that loads libtorch takes a second of processor time before
/// it begins: 40 minutes for all of them.
fn on_cpu(workspace: &Workspace, words: &str) -> Command {
    workspace.warn_without_python();
    workspace.test(&format!("--no-fail-fast {words}"))
}

/// `cargo test` on the CPU, where all that autograd saves goes through hooks that change nothing.
fn with_hooks(workspace: &Workspace, words: &str) -> Command {
    let mut tests = on_cpu(workspace, words);
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

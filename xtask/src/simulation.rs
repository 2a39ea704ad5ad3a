//! The tests on simulated GPUs.

use std::env;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use testbench::simulated_cuda::{Simulation, check_possible};

use crate::args::Args;
use crate::steps::{self, show};
use crate::versions::Pair;
use crate::workspace::Workspace;
use crate::{paths, process};

/// Modules or tests of a program, by what their names begin with; none stands for all of them. What is not in the same
/// program is another's: a filter of one command would find its names in others, too.
pub(crate) type Parts = (&'static str, &'static [&'static str]);

/// The tests that use devices.
const ON_DEVICES: [Parts; 8] = [
    ("devices", &[]),
    ("files", &["checkpoint::round_trip::", "checkpoint::weights::"]),
    ("memory", &[]),
    ("precision", &[]),
    ("processes", &["resume::"]),
    ("regions", &[]),
    ("reports", &["budget::cuda::", "insight::"]),
    ("steps", &[]),
];

/// Tests of `steps` that need none, and run on the CPU beside.
pub(crate) const STEPS_ON_THE_CPU: [&str; 4] = [
    "optim::low_bit::a_step_has_the_bits_of_the_definition",
    "optim::low_bit::every_set_of_instructions_has_the_same_bits",
    "optim::low_bit::histories::",
    "optim::low_bit::losses::",
];

/// The tests that depend on copies from a device run with copies that arrive immediately, and with copies that arrive
/// only when the host synchronizes. A step of an optimizer waits for no copy: it runs with the late ones alone.
const LAGS: [(&str, [Parts; 2]); 2] = [
    ("0", [("steps", &["scaler::", "schedule::"]), ABOUT_LAGS]),
    ("never", [("steps", &["optim::", "scaler::", "schedule::"]), ABOUT_LAGS]),
];
const ABOUT_LAGS: Parts = ("devices", &["controls::", "saved_tensors::", "skips::"]);

/// Tests that run on the CPU, too, where they run on devices: in one process, first here and then there.
const ON_BOTH: [Parts; 2] = [
    ("reports", &["insight::"]),
    ("steps", &["accumulation::", "average::", "optim::", "scaler::", "schedule::"]),
];

/// Those of [`ON_BOTH`] that run fewer random programs on devices than on the CPU.
const MORE_ON_THE_CPU: [&str; 2] = ["optim::programs::", "scaler::programs::"];

/// The tests that see which operators libtorch has on a device, and what its kernels do.
pub(crate) const OF_KERNELS: [Parts; 2] = [
    ("regions", &["autocast::", "function::"]),
    ("steps", &["accumulation::", "average::", "optim::", "scaler::"]),
];

/// Which tests to run.
#[derive(Clone, Debug)]
pub(crate) enum Extent {
    /// All of them.
    Whole,
    /// All but these parts of programs, of which these tests run nevertheless, each with its program.
    Without { parts: &'static [Parts], except: Vec<(&'static str, &'static str)> },
    /// Those that depend on the version of libtorch.
    OfKernels,
}

/// Runs the tests on simulated GPUs, with CUDA required. Returns whether that is possible.
pub(crate) fn test(workspace: &Workspace, extent: Extent) -> Result<bool> {
    let Some(simulation) = provide(workspace)? else { return Ok(false) };
    let make = || simulated(workspace, &simulation);
    let of_library = show(make().arg("--lib"));
    let of_programs = match extent {
        Extent::Whole => run_parts(&ON_DEVICES, &STEPS_ON_THE_CPU, make),
        Extent::Without { parts, except } => run_rest(parts, &except, make),
        Extent::OfKernels => run_parts(&OF_KERNELS, &[], make),
    };
    steps::all([of_library, of_programs])?;
    Ok(true)
}

/// What runs without devices: a name and the arguments of `cargo test` for each program. Where tests can run on
/// simulated GPUs, [`ON_BOTH`] is left to these.
pub(crate) fn beside_devices(workspace: &Workspace) -> Result<Vec<(String, String)>> {
    let on_both = check_possible(&workspace.libtorch).map_or(&[][..], |()| &ON_BOTH);
    let mut tests = Vec::new();
    for program in programs()? {
        let parts = on_both.iter().filter(|(of, _)| *of == program).flat_map(|(_, parts)| *parts);
        let skipped: String = parts.map(|part| format!(" --skip {part}")).collect();
        let words = format!("--test {program} --{skipped}");
        tests.push((program, words));
    }
    if !on_both.is_empty() {
        let rest = [&MORE_ON_THE_CPU[..], &STEPS_ON_THE_CPU].concat().join(" ");
        tests.push(("steps of the CPU alone".to_owned(), format!("--test steps -- {rest}")));
    }
    Ok(tests)
}

/// Has tests that use no device load the simulated GPUs in place of libtorch_cuda, and none of them: the real library's
/// million relocations take each process longer than many a test. On a machine with a GPU they load the real one.
pub(crate) fn without_devices(workspace: &Workspace, tests: &mut Command) -> Result<()> {
    let has_gpu = Path::new("/dev/nvidiactl").exists();
    if !has_gpu && check_possible(&workspace.libtorch).is_ok() {
        Simulation::provide(&workspace.libtorch)?.apply(tests);
        tests.env("SIMULATED_CUDA_DEVICES", "0");
    }
    Ok(())
}

/// Runs each program without its part in `left_out`, and then its tests in `except`.
fn run_rest(left_out: &[Parts], except: &[(&str, &str)], make: impl Fn() -> Command) -> Result<()> {
    let rest = ON_DEVICES.iter().map(|part| {
        match left_out.iter().find(|(program, _)| *program == part.0) {
            Some((_, [])) => Ok(()),
            Some((_, parts)) => run_parts(&[*part], &[*parts, &STEPS_ON_THE_CPU].concat(), &make),
            None => run_parts(&[*part], &STEPS_ON_THE_CPU, &make),
        }
    });
    let except = left_out.iter().map(|(program, _)| {
        let own = except.iter().filter(|(of, _)| of == program).map(|(_, name)| *name);
        show(make().args(["--test", program, "--"]).args(own))
    });
    steps::all(rest.chain(except))
}

/// Runs the parts of each program by a command that `make` begins, without what is left out: also after a program that
/// has failed, so that one run shows all failures.
pub(crate) fn run_parts(
    parts: &[Parts],
    left_out: &[&str],
    make: impl Fn() -> Command,
) -> Result<()> {
    steps::all(parts.iter().map(|(program, parts)| {
        let mut tests = make();
        tests.args(["--test", program, "--"]).args(*parts);
        show(tests.args(left_out.iter().flat_map(|name| ["--skip", name])))
    }))
}

/// Runs the tests that depend on copies from a device with copies that arrive at another time.
pub(crate) fn test_lags(workspace: &Workspace) -> Result<()> {
    let Some(simulation) = provide(workspace)? else { return Ok(()) };
    for (lag, parts) in &LAGS {
        println!("\n-- SIMULATED_CUDA_LAG={lag}");
        run_parts(parts, &STEPS_ON_THE_CPU, || {
            let mut tests = simulated(workspace, &simulation);
            tests.env("SIMULATED_CUDA_LAG", lag);
            tests
        })?;
    }
    Ok(())
}

/// The simulated GPUs, if they are possible. Warns otherwise.
fn provide(workspace: &Workspace) -> Result<Option<Simulation>> {
    let lost = "the tests on simulated GPUs are SKIPPED, and with them every CUDA path";
    let is_possible = or_warn(check_possible(&workspace.libtorch), lost);
    is_possible.then(|| Simulation::provide(&workspace.libtorch)).transpose()
}

/// Whether something is possible. Otherwise prints what is lost, and why.
pub(crate) fn or_warn(possible: Result<()>, lost: &str) -> bool {
    if let Err(reason) = &possible {
        eprintln!("WARNING: {lost}: {reason:#}");
    }
    possible.is_ok()
}

fn simulated(workspace: &Workspace, simulation: &Simulation) -> Command {
    let mut tests = on_counted_devices(workspace);
    simulation.apply(&mut tests);
    tests
}

/// `cargo test` for tests that fail without CUDA devices which are counted.
pub(crate) fn on_counted_devices(workspace: &Workspace) -> Command {
    let mut tests = workspace.test("--package tch-amp");
    tests.envs(FEWER_PROGRAMS).envs(REQUIRED);
    tests
}

/// Have tests fail without CUDA devices which are counted.
pub(crate) const REQUIRED: [(&str, &str); 2] =
    [("TCH_AMP_REQUIRE_CUDA", "1"), ("TCH_AMP_REQUIRE_SIMULATION", "1")];

/// The number of random programs where the full one does not run: that is on the CPU with the locked version of tch.
pub(crate) const FEWER_PROGRAMS: [(&str, &str); 2] =
    [("TCH_AMP_PROGRAMS", "400"), ("TCH_AMP_OPTIM_PROGRAMS", "300")];

/// The names of the programs of tests: the files and the folders with a `main.rs`.
pub(crate) fn programs() -> Result<Vec<String>> {
    let mut paths = paths::entries(&paths::root().join("tests"))?;
    let is_rust = |path: &Path| path.extension().is_some_and(|kind| kind == "rs");
    paths.retain(|path| is_rust(path) || path.join("main.rs").is_file());
    Ok(paths.iter().map(|path| paths::stem(path)).collect())
}

/// `cargo xtask simulate`.
pub(crate) fn run(mut args: Args) -> Result<ExitCode> {
    let pair = args.leading_tch()?;
    run_program(args, pair, "simulate", |workspace, command| {
        Simulation::provide(&workspace.libtorch)?.apply(command);
        Ok(())
    })
}

/// Runs the program that the words name, prepared for devices, and prints what it cost them.
pub(crate) fn run_program(
    args: Args,
    pair: Option<Pair>,
    chore: &str,
    prepare: impl FnOnce(&Workspace, &mut Command) -> Result<()>,
) -> Result<ExitCode> {
    let mut words = args.rest().into_iter();
    let program = words.next().with_context(|| {
        format!("say what to run, for instance `cargo xtask {chore} cargo run --example train`")
    })?;
    let workspace = Workspace::new(pair)?;
    let mut command = workspace.command(&program);
    command.args(words);
    prepare(&workspace, &mut command)?;
    if env::var_os("SIMULATED_CUDA_REPORT").is_none() {
        command.env("SIMULATED_CUDA_REPORT", "1");
    }
    process::exit_code(&mut command)
}

/// Fails if a program of tests, or a part of it, does not exist.
#[cfg(test)]
pub(crate) fn check_names(parts: &[Parts]) {
    let programs = programs().unwrap();
    for (program, parts) in parts {
        assert!(programs.iter().any(|there| there == program), "{program}");
        parts.iter().for_each(|part| check_name(program, part));
    }
}

/// Fails if a program has no such module or test.
#[cfg(test)]
pub(crate) fn check_name(program: &str, part: &str) {
    let source = source_of(program, part);
    let (_, function) = part.rsplit_once("::").unwrap();
    assert!(function.is_empty() || source.contains(&format!("fn {function}(")), "{part}");
}

/// The source of the module of a part, whose name ends with `::` or is that of a test.
#[cfg(test)]
fn source_of(program: &str, part: &str) -> String {
    let (module, _) = part.rsplit_once("::").expect("a part has a module");
    let module = paths::root().join("tests").join(program).join(module.replace("::", "/"));
    let mut files = [module.with_extension("rs"), module.join("mod.rs")].into_iter();
    let file = files.find(|file| file.is_file());
    paths::read(&file.unwrap_or_else(|| panic!("there is no {}", module.display()))).unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_named_test_exists() {
        check_names(&ON_DEVICES);
        check_names(&ON_BOTH);
        check_names(&OF_KERNELS);
        LAGS.iter().for_each(|(_, parts)| check_names(parts));
        check_names(&[("steps", &STEPS_ON_THE_CPU), ("steps", &MORE_ON_THE_CPU)]);
    }

    #[test]
    fn what_is_left_to_devices_runs_there() {
        for (program, parts) in ON_BOTH {
            let (_, there) = ON_DEVICES.iter().find(|(name, _)| *name == program).expect(program);
            let runs = |part| there.is_empty() || there.contains(part);
            assert!(parts.iter().all(runs), "{program}: {there:?} on devices");
        }
        let left = |name: &str| ON_BOTH[1].1.iter().any(|part| name.starts_with(part));
        assert!(STEPS_ON_THE_CPU.into_iter().chain(MORE_ON_THE_CPU).all(left));
    }

    #[test]
    fn parts_on_the_cpu_use_no_device() {
        for name in STEPS_ON_THE_CPU {
            let source = source_of("steps", name);
            // A whole module, or one of its functions.
            let source = match name.rsplit_once("::").unwrap() {
                (_, "") => &*source,
                (_, function) => {
                    let (_, rest) = source.split_once(&format!("fn {function}(")).expect(name);
                    rest.split("\n}\n").next().unwrap_or(rest)
                }
            };
            for device in ["cuda", "gpu", "device(", "devices("] {
                assert!(!source.to_lowercase().contains(device), "{name} uses {device}");
            }
        }
    }
}

//! The tests on simulated GPUs.

#[cfg(test)]
use std::path::Path;
use std::process::{Command, ExitCode};
use std::{env, fs};

use anyhow::{Context, Result, bail};
use testbench::simulated_cuda::{Simulation, check_possible};

use crate::args::Args;
use crate::process::run as show;
use crate::workspace::Workspace;
use crate::{paths, process};

/// The programs with tests that use devices.
const ON_DEVICES: [&str; 6] = ["devices", "memory", "precision", "regions", "reports", "steps"];

/// Parts of these that need none, by what their names begin with.
const PARTS_ON_THE_CPU: [&str; 6] = [
    "budget::",
    "optim::adam_fp16::",
    "optim::low_bit::a_step_has_the_bits_of_the_definition",
    "optim::low_bit::every_set_of_instructions_has_the_same_bits",
    "optim::low_bit::histories::",
    "optim::low_bit::losses::",
];

/// The tests of other programs and of such parts that use devices.
const OTHERS_ON_DEVICES: [(&str, &[&str]); 3] = [
    ("files", &["checkpoint::round_trip::", "checkpoint::weights::"]),
    ("processes", &["resume::"]),
    ("reports", &["budget::cuda::"]),
];

/// The tests that depend on copies from a device run with copies that arrive immediately, and with copies that arrive
/// only when the host synchronizes. A step of an optimizer waits for no copy: it runs with the late ones alone.
const LAGS: [(&str, &[&str]); 2] =
    [("0", &["scaler::", "schedule::"]), ("never", &["optim::", "scaler::", "schedule::"])];
const ABOUT_LAGS: [&str; 2] = ["controls::", "skips::"];

/// The tests that see which operators libtorch has on a device, and what its kernels do.
const OF_KERNELS: [(&str, &[&str]); 2] = [
    ("regions", &["autocast::", "function::"]),
    ("steps", &["accumulation::", "average::", "optim::", "scaler::"]),
];

/// Which tests to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    /// All of them.
    Whole,
    /// Those that depend on the version of libtorch.
    OfKernels,
}

/// Runs the tests on simulated GPUs, with CUDA required. Returns whether that is possible.
pub(crate) fn test(workspace: &Workspace, extent: Extent) -> Result<bool> {
    if !is_possible(workspace) {
        return Ok(false);
    }
    let simulation = Simulation::provide(&workspace.libtorch)?;
    let tests = |programs: &[&str]| cargo_test(workspace, &simulation, programs);
    if extent == Extent::OfKernels {
        show(tests(&[]).arg("--lib"))?;
        let all = OF_KERNELS.map(|(program, _)| program);
        show(skip_comparisons(only(&mut tests(&all), &OF_KERNELS)))?;
        return Ok(true);
    }
    show(skip_parts_on_the_cpu(tests(&ON_DEVICES).args(["--lib", "--"])))?;
    let others = OTHERS_ON_DEVICES.map(|(program, _)| program);
    show(only(&mut tests(&others), &OTHERS_ON_DEVICES))?;
    Ok(true)
}

/// The parts that run with [`Extent::OfKernels`], but for [those that are left out](skip_comparisons).
pub(crate) fn parts_of_kernels() -> impl Iterator<Item = &'static str> {
    OF_KERNELS.into_iter().flat_map(|(_, parts)| parts).copied()
}

/// Adds the names of these parts to a command of cargo that runs their programs.
pub(crate) fn only<'a>(tests: &'a mut Command, parts: &[(&str, &[&str])]) -> &'a mut Command {
    tests.arg("--");
    for (_, parts) in parts {
        tests.args(*parts);
    }
    tests
}

/// Runs the tests that depend on copies from a device with copies that arrive at another time.
pub(crate) fn test_lags(workspace: &Workspace) -> Result<()> {
    if !is_possible(workspace) {
        return Ok(());
    }
    let simulation = Simulation::provide(&workspace.libtorch)?;
    for (lag, parts) in LAGS {
        println!("\n-- SIMULATED_CUDA_LAG={lag}");
        for (program, parts) in [("steps", parts), ("devices", &ABOUT_LAGS)] {
            let mut tests = cargo_test(workspace, &simulation, &[program]);
            tests.env("SIMULATED_CUDA_LAG", lag).arg("--").args(parts);
            show(skip_parts_on_the_cpu(&mut tests))?;
        }
    }
    Ok(())
}

/// Whether the tests can run on simulated GPUs. Warns otherwise.
fn is_possible(workspace: &Workspace) -> bool {
    let possible = check_possible(&workspace.libtorch);
    if let Err(reason) = &possible {
        eprintln!(
            "WARNING: the tests on simulated GPUs are SKIPPED, and with them every CUDA path: {reason:#}"
        );
    }
    possible.is_ok()
}

fn cargo_test(workspace: &Workspace, simulation: &Simulation, programs: &[&str]) -> Command {
    let mut tests = on_counted_devices(workspace, programs);
    simulation.apply(&mut tests);
    tests
}

/// `cargo test` for these programs of tests, which fail without CUDA devices that are counted.
pub(crate) fn on_counted_devices(workspace: &Workspace, programs: &[&str]) -> Command {
    let mut tests = workspace.cargo_test();
    tests.args(["--package", "tch-amp"]);
    for name in programs {
        tests.args(["--test", name]);
    }
    fewer_programs(&mut tests);
    tests.env("TCH_AMP_REQUIRE_CUDA", "1").env("TCH_AMP_REQUIRE_SIMULATION", "1");
    tests
}

/// Leaves out what another run of the same libtorch tests on the CPU, of programs of tests that follow `--`.
pub(crate) fn skip_parts_on_the_cpu(tests: &mut Command) -> &mut Command {
    for name in PARTS_ON_THE_CPU {
        tests.args(["--skip", name]);
    }
    tests
}

/// Leaves out the fixed cases and random programs of these modules that are compared with PyTorch, which computes on the
/// CPU.
pub(crate) fn skip_comparisons(tests: &mut Command) -> &mut Command {
    tests.args(
        ["function::cases::", "optim::programs::", "scaler::programs::"]
            .map(|name| format!("--skip={name}")),
    )
}

/// Reduces the number of random programs. The full number runs on the CPU with the locked version of tch.
pub(crate) fn fewer_programs(tests: &mut Command) {
    tests.env("TCH_AMP_PROGRAMS", "400").env("TCH_AMP_OPTIM_PROGRAMS", "300");
}

/// The names of the programs of tests: the files and the folders with a `main.rs`.
pub(crate) fn programs() -> Result<Vec<String>> {
    let folder = paths::root().join("tests");
    let entries =
        fs::read_dir(&folder).with_context(|| format!("{} cannot be read", folder.display()))?;
    let mut names = Vec::new();
    for entry in entries {
        let path = entry?.path();
        let is_test =
            path.extension().is_some_and(|kind| kind == "rs") || path.join("main.rs").is_file();
        if let Some(name) = path.file_stem().filter(|_| is_test) {
            names.push(name.to_string_lossy().into_owned());
        }
    }
    names.sort();
    Ok(names)
}

/// `cargo xtask simulate`.
pub(crate) fn run(mut args: Args) -> Result<ExitCode> {
    let pair = args.leading_tch()?;
    let mut words = args.rest().into_iter();
    let Some(program) = words.next() else {
        bail!(
            "say what to run on the simulated GPUs, for instance \
             `cargo xtask simulate cargo run --example train`"
        );
    };
    let workspace = Workspace::new(pair)?;
    let simulation = Simulation::provide(&workspace.libtorch)?;
    let mut command = workspace.command(&program);
    command.args(words);
    simulation.apply(&mut command);
    if env::var_os("SIMULATED_CUDA_REPORT").is_none() {
        command.env("SIMULATED_CUDA_REPORT", "1");
    }
    process::exit_code(&mut command)
}

/// Fails if a program of tests, or a part of it, does not exist.
#[cfg(test)]
pub(crate) fn check_names(parts: &[(&str, &[&str])]) {
    for (program, parts) in parts {
        let folder = paths::root().join("tests").join(program);
        assert!(folder.join("main.rs").is_file(), "{program}");
        for part in *parts {
            // A module, or one of its functions.
            let (module, function) =
                part.rsplit_once("::").expect("a part ends with `::` or a name");
            let source = source_of(&folder.join(module.replace("::", "/")));
            assert!(source.contains(&format!("fn {function}")), "{part}");
        }
    }
}

/// The source of a module.
#[cfg(test)]
fn source_of(module: &Path) -> String {
    let file = [module.with_extension("rs"), module.join("mod.rs")]
        .into_iter()
        .find(|file| file.is_file());
    fs::read_to_string(file.unwrap_or_else(|| panic!("there is no {}", module.display()))).unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_named_test_exists() {
        let names = programs().unwrap();
        for name in ON_DEVICES {
            assert!(names.iter().any(|there| there == name), "{name}");
        }
        let with_lags = LAGS.map(|(_, parts)| ("steps", parts));
        let all = [&OTHERS_ON_DEVICES[..], &OF_KERNELS, &with_lags, &[("devices", &ABOUT_LAGS)]];
        check_names(&all.concat());
    }

    #[test]
    fn parts_on_the_cpu_exist_and_use_no_device() {
        // Of budgets, the part that uses one is named beside it.
        for name in &PARTS_ON_THE_CPU[1..] {
            check_names(&[("steps", &[name])]);
            let (module, function) = name.rsplit_once("::").unwrap();
            let source =
                source_of(&paths::root().join("tests/steps").join(module.replace("::", "/")));
            // A whole module, or one of its functions.
            let source = match function {
                "" => &*source,
                function => {
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

//! The simulated GPUs: builds `tests/simulated_cuda/` as a library that replaces libtorch_cuda.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::{env, fs};

use anyhow::{Context, Result, bail, ensure};

use crate::args::Args;
use crate::compiled::{self, Unit, cxx, files};
use crate::libtorch::Libtorch;
use crate::process::run as show;
use crate::workspace::Workspace;
use crate::{paths, process};

/// The path of the sources, relative to the root of the repository.
pub(crate) const SOURCES: &str = "tests/simulated_cuda";

const LIBRARY: &str = "libtorch_cuda.so";

/// The built library.
#[derive(Debug)]
pub(crate) struct Simulation {
    folder: PathBuf,
}

impl Simulation {
    /// Builds the library for the libtorch of a workspace, unless that was done before.
    pub(crate) fn provide(workspace: &Workspace) -> Result<Self> {
        let libtorch = &workspace.libtorch;
        check_possible(libtorch)?;
        let build = |folder: &Path| build(libtorch, folder);
        let folder = compiled::provide("simulated_cuda", workspace, &files(SOURCES, "")?, build)?;
        Ok(Self { folder })
    }

    /// Makes `command` and the processes that it starts use the simulated GPUs instead of real ones.
    pub(crate) fn apply(&self, command: &mut Command) {
        compiled::search_first(&self.folder, command);
    }
}

/// Compiles the sources that have changed, and links.
fn build(libtorch: &Libtorch, folder: &Path) -> Result<()> {
    let operators = folder.join("operators.inc");
    // The list of CUDA's operators, which `operators.cpp` includes.
    let mut script = compiled::python(libtorch, SOURCES, "operators.py");
    process::run(script.arg(functions_of(libtorch)).arg(&operators))?;
    let mut headers = files(SOURCES, ".h")?;
    headers.push(operators);
    let unit = Unit {
        libtorch,
        folder,
        flags: &[],
        system: vec![paths::root().join("csrc/distributed/gloo_headers")],
        own: vec![folder.to_owned()],
        headers,
    };
    let objects = unit.compile(&files(SOURCES, ".cpp")?)?;
    let mut linker = cxx();
    linker.args(["-shared", "-o"]).arg(folder.join(LIBRARY)).args(&objects);
    linker.arg(format!("-Wl,-soname,{LIBRARY}"));
    linker.arg("-L").arg(libtorch.lib()).args(["-ltorch_cpu", "-lc10"]);
    process::run(&mut linker)
}

/// The list of PyTorch's operators, which the wheel contains beside torch.
fn functions_of(libtorch: &Libtorch) -> PathBuf {
    libtorch.site().join("torchgen/packaged/ATen/native/native_functions.yaml")
}

/// Fails with the reason if GPUs cannot be simulated.
pub(crate) fn check_possible(libtorch: &Libtorch) -> Result<()> {
    ensure!(cfg!(target_os = "linux"), "GPUs are simulated on Linux only");
    ensure!(
        libtorch.has_cuda(),
        "the libtorch in {} is one without CUDA, and what is linked with it asks for no GPU: set LIBTORCH to a CUDA \
         build, or unset it to have one downloaded",
        libtorch.root.display()
    );
    let functions = functions_of(libtorch);
    ensure!(
        functions.is_file(),
        "there is no {}: the simulated GPUs need the libtorch of a PyTorch wheel; unset LIBTORCH to have one downloaded",
        functions.display()
    );
    Ok(())
}

/// Tests that use no device, or that measure a process on the CPU: its memory, its files, its signals.
const CPU_ONLY: [&str; 13] = [
    "abi",
    "budget",
    "checkpoint",
    "demo",
    "distributed",
    "examples",
    "function_soak",
    "linking",
    "master_memory",
    "recipe",
    "scaler_soak",
    "tensors",
    "threads",
];

/// Parts of other tests of which the same is true, by what their names begin with.
const PARTS_ON_THE_CPU: [&str; 5] = [
    "adam_fp16::",
    "low_bit::a_step_has_the_bits_of_the_definition",
    "low_bit::every_set_of_instructions_has_the_same_bits",
    "low_bit::histories::",
    "low_bit::losses::",
];

/// The tests that depend on copies from a device run with copies that arrive immediately, and with copies that arrive
/// only when the host synchronizes. A step of an optimizer waits for no copy: it runs with the late ones alone.
const LAGS: [(&str, &[&str]); 2] =
    [("0", &["scaler", "schedule"]), ("never", &["optim", "scaler", "schedule"])];
/// The tests of checkpoints that use devices.
const OF_CHECKPOINTS: [&str; 5] = ["--test", "checkpoint", "--", "round_trip::", "weights::"];
/// Budgets with the lists of CUDA.
const OF_BUDGETS: [&str; 4] = ["--test", "budget", "--", "cuda::"];
const ABOUT_LAGS: [&str; 5] = ["--test", "simulated", "--", "controls::", "skips::"];

/// The tests that see which operators libtorch has on a device, and what its kernels do.
const OF_KERNELS: [&str; 7] =
    ["accumulation", "autocast", "autocast_ops", "average", "function", "optim", "scaler"];

/// Which tests to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    /// All of them.
    Whole,
    /// Those that depend on the version of libtorch.
    OfKernels,
}

/// Whether these tests are among those of [`Extent::OfKernels`].
pub(crate) fn is_of_kernels(name: &str) -> bool {
    OF_KERNELS.contains(&name)
}

/// Adds those of cargo's integration tests that `which` selects by their names to a command of cargo.
pub(crate) fn add(tests: &mut Command, which: impl Fn(&str) -> bool) -> Result<()> {
    let names = integration_tests(&paths::root().join("tests"))?;
    for name in names.iter().filter(|name| which(name.as_str())) {
        tests.args(["--test", name]);
    }
    Ok(())
}

/// Runs the tests on simulated GPUs, with CUDA required. Returns whether that is possible.
pub(crate) fn test(workspace: &Workspace, extent: Extent) -> Result<bool> {
    if !is_possible(workspace) {
        return Ok(false);
    }
    let simulation = Simulation::provide(workspace)?;
    let names = integration_tests(&paths::root().join("tests"))?;
    if extent == Extent::OfKernels {
        show(cargo_test(workspace, &simulation, OF_KERNELS).arg("--lib"))?;
        return Ok(true);
    }
    let on_devices = names.iter().map(String::as_str).filter(|name| !CPU_ONLY.contains(name));
    let mut tests = cargo_test(workspace, &simulation, on_devices);
    show(skip_parts_on_the_cpu(tests.args(["--lib", "--"])))?;
    show(cargo_test(workspace, &simulation, []).args(OF_CHECKPOINTS))?;
    show(cargo_test(workspace, &simulation, []).args(OF_BUDGETS))?;
    Ok(true)
}

/// Runs the tests that depend on copies from a device with copies that arrive at another time.
pub(crate) fn test_lags(workspace: &Workspace) -> Result<()> {
    if !is_possible(workspace) {
        return Ok(());
    }
    let simulation = Simulation::provide(workspace)?;
    for (lag, names) in LAGS {
        println!("\n-- SIMULATED_CUDA_LAG={lag}");
        let mut tests = cargo_test(workspace, &simulation, names.iter().copied());
        show(skip_parts_on_the_cpu(tests.env("SIMULATED_CUDA_LAG", lag).arg("--")))?;
        let mut tests = cargo_test(workspace, &simulation, []);
        show(tests.args(ABOUT_LAGS).env("SIMULATED_CUDA_LAG", lag))?;
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

fn cargo_test<'a>(
    workspace: &Workspace,
    simulation: &Simulation,
    names: impl IntoIterator<Item = &'a str>,
) -> Command {
    let mut tests = on_counted_devices(workspace, names);
    simulation.apply(&mut tests);
    tests
}

/// `cargo test` for these integration tests, which fail without CUDA devices that are counted.
pub(crate) fn on_counted_devices<'a>(
    workspace: &Workspace,
    names: impl IntoIterator<Item = &'a str>,
) -> Command {
    let mut tests = workspace.cargo_test();
    tests.args(["--package", "tch-amp"]);
    for name in names {
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

/// Reduces the number of random programs. The full number runs on the CPU with the locked version of tch.
pub(crate) fn fewer_programs(tests: &mut Command) {
    tests.env("TCH_AMP_PROGRAMS", "400").env("TCH_AMP_OPTIM_PROGRAMS", "300");
}

/// The names of cargo's integration tests: the files and the folders with a `main.rs`.
pub(crate) fn integration_tests(folder: &Path) -> Result<Vec<String>> {
    let entries =
        fs::read_dir(folder).with_context(|| format!("{} cannot be read", folder.display()))?;
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
    let simulation = Simulation::provide(&workspace)?;
    let mut command = workspace.command(&program);
    command.args(words);
    simulation.apply(&mut command);
    if env::var_os("SIMULATED_CUDA_REPORT").is_none() {
        command.env("SIMULATED_CUDA_REPORT", "1");
    }
    process::exit_code(&mut command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_named_test_exists() {
        let names = integration_tests(&paths::root().join("tests")).unwrap();
        let with_lags = LAGS.iter().flat_map(|(_, names)| *names);
        for name in CPU_ONLY.iter().chain(with_lags).chain(&OF_KERNELS) {
            assert!(names.iter().any(|there| there == name), "{name}");
        }
        for selected in [&OF_CHECKPOINTS[..], &OF_BUDGETS, &ABOUT_LAGS] {
            let suite = selected[1];
            for module in &selected[3..] {
                let path = format!("tests/{suite}/{}.rs", module.trim_end_matches("::"));
                assert!(paths::root().join(&path).is_file(), "{path}");
            }
        }
    }

    #[test]
    fn parts_on_the_cpu_exist_and_use_no_device() {
        for name in PARTS_ON_THE_CPU {
            let (module, function) = name.rsplit_once("::").unwrap();
            let path = format!("tests/optim/{}.rs", module.replace("::", "/"));
            let source = fs::read_to_string(paths::root().join(&path)).unwrap();
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

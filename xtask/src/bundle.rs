//! `cargo xtask bundle`: tests, examples and benches in one folder, for a machine without Rust.
//!
//! With `--lease` it has the programs of `bundle/lease.json` alone: three calls that find out what a GPU has to say
//! while it is there for a short time.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::args::Args;
use crate::libtorch::Libtorch;
use crate::workspace::{self, Workspace};
use crate::{compiler, null_cuda, paths, process};

const RUN: &str = include_str!("bundle/run.py");

/// The calls of a lease, with the programs of each, and what each sentence of the guarantees is confirmed by.
const LEASE: &str = include_str!("bundle/lease.json");

/// What a lease has beside `run.py`.
const OF_LEASES: [(&str, &str); 3] = [
    ("lease.json", LEASE),
    ("machine.py", include_str!("bundle/machine.py")),
    ("report.py", include_str!("bundle/report.py")),
];

/// What the programs may read when they run: oracles, data, and the sources that some tests parse.
const READ: [&str; 9] =
    ["README.md", "benches", "csrc", "docs", "examples", "fuzz/seeds", "recipes", "src", "tests"];

/// Libraries that `run.py` preloads, made of a source each if libtorch is one for CUDA.
const PRELOADS: [&str; 2] = ["counters", "second_device"];

/// The most that a bundle may have, and that for a lease: with the rest of a working tree it is sent in 64 MiB.
const MAX_MIB: u64 = 60;
const MAX_MIB_OF_LEASES: u64 = 55;

/// The kinds of programs, which are folders in the bundle: cargo's command for all of them, and its option for one.
const KINDS: [(&str, &str, &[&str], &str); 3] = [
    ("tests", "test --features full --release --no-run", &["--tests"], "--test"),
    ("examples", "build --features full --release", &["--examples"], "--example"),
    ("bench", "bench --features full --no-run", &["--bench", "*"], "--bench"),
];

/// `cargo xtask bundle`.
pub(crate) fn run(mut args: Args) -> Result<()> {
    let pair = args.tch()?;
    let is_lease = args.flag("--lease");
    args.end()?;
    let workspace = Workspace::announced(pair)?;
    let (tch, libtorch) = (workspace.pair.tch, workspace.pair.libtorch);
    let name = if is_lease { "lease" } else { "bundle" };
    let bundle = paths::target().join(format!("{name}-{tch}-{libtorch}"));
    paths::make_empty(bundle.clone())?;
    let chosen = is_lease.then(|| leased(LEASE)).transpose()?;
    build(&workspace, &bundle.join("bin"), chosen.as_ref())?;
    pack(&bundle)?;
    if workspace.libtorch.has_cuda() {
        compile_preloads(&workspace.libtorch, &bundle.join("lib"))?;
    }
    for name in READ {
        workspace::copy(&paths::root().join(name), &bundle.join(name))?;
    }
    let script = bundle.join("run.py");
    fs::write(&script, RUN.replace("@TORCH@", libtorch))?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    if is_lease {
        for (name, text) in OF_LEASES {
            fs::write(bundle.join(name), text)?;
        }
        null_cuda::count(&bundle)?;
    }
    report(&bundle, if is_lease { MAX_MIB_OF_LEASES } else { MAX_MIB })
}

/// The programs that the steps of a lease name, such as `tests/steps/scaler`.
fn leased(plan: &str) -> Result<BTreeSet<String>> {
    let plan: Value = serde_json::from_str(plan).context("lease.json is not JSON")?;
    let of = |value: &Value, key: &str| value[key].as_array().cloned().unwrap_or_default();
    let stages = of(&plan, "calls").into_iter().flat_map(|call| of(&call, "stages"));
    let steps = stages.flat_map(|stage| of(&stage, "steps"));
    let mut programs = BTreeSet::new();
    for step in steps {
        let words = step.as_str().context("a step is a line")?.split(' ');
        let is_program = |word: &&str| word.split_once('/').is_some_and(|(kind, _)| is_kind(kind));
        programs.extend(words.filter(is_program).map(str::to_owned));
    }
    Ok(programs)
}

fn is_kind(name: &str) -> bool {
    KINDS.iter().any(|(kind, ..)| *kind == name)
}

/// Builds all programs or the chosen ones with the release profile, which `cargo bench` shares, and strips the copies.
fn build(workspace: &Workspace, bin: &Path, chosen: Option<&BTreeSet<String>>) -> Result<()> {
    for (kind, command, all, one) in KINDS {
        let dir = paths::make(bin.join(kind))?;
        let mut cargo = workspace.cargo(command);
        cargo.arg("--message-format=json-render-diagnostics");
        match chosen {
            None => {
                cargo.args(all);
            }
            Some(programs) => {
                let names = programs.iter().filter_map(|program| program.split_once('/'));
                for (_, name) in names.filter(|(of, _)| *of == kind) {
                    cargo.args([one, name]);
                }
            }
        }
        for program in programs(&process::read_showing_errors(&mut cargo)?) {
            let mut strip = Command::new("strip");
            strip.arg("-o").arg(dir.join(&program.name)).arg(&program.path);
            process::run(&mut strip).context("binutils is needed")?;
        }
    }
    Ok(())
}

/// Replaces `bin` by an archive of it, an eighth as large because the programs have much in common.
fn pack(bundle: &Path) -> Result<()> {
    let mut tar = Command::new("tar");
    tar.env("XZ_OPT", "--lzma2=preset=1,dict=256MiB").current_dir(bundle);
    process::run(tar.args(["--sort=name", "-cJf", "bin.tar.xz", "bin"])).context("xz is needed")?;
    Ok(fs::remove_dir_all(bundle.join("bin"))?)
}

/// Compiles `testbench/real_cuda` with the headers of CUDA that the wheels of PyTorch bring.
fn compile_preloads(libtorch: &Libtorch, folder: &Path) -> Result<()> {
    fs::create_dir_all(folder)?;
    let site = libtorch.site();
    let cuda = site.join("nvidia/cu13");
    // The wheel of CUDA's runtime has no crt/, but Triton's has.
    let headers = [
        libtorch.root.join("include"),
        cuda.join("include"),
        site.join("triton/backends/nvidia/include"),
    ];
    for name in PRELOADS {
        let mut compiler = compiler::command();
        compiler.args(["-std=c++17", "-O1", "-fPIC", "-Wall", "-Wextra", "-shared"]);
        for headers in &headers {
            compiler.arg("-isystem").arg(headers);
        }
        compiler.arg(paths::root().join("testbench/real_cuda").join(format!("{name}.cpp")));
        compiler.arg("-o").arg(folder.join(format!("lib{name}.so")));
        compiler.arg("-L").arg(libtorch.lib()).arg("-L").arg(cuda.join("lib"));
        compiler.args(["-Wl,--as-needed", "-lc10_cuda", "-lc10", "-l:libcupti.so.13", "-ldl"]);
        process::run(&mut compiler)?;
    }
    Ok(())
}

#[derive(Debug, PartialEq, Eq)]
struct Program {
    name: String,
    path: PathBuf,
}

/// The executables among cargo's messages.
fn programs(messages: &str) -> Vec<Program> {
    let artifacts = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let programs = artifacts.filter_map(|artifact| {
        let name = artifact["target"]["name"].as_str()?.to_owned();
        let path = artifact["executable"].as_str()?.into();
        Some(Program { name, path })
    });
    programs.collect()
}

fn report(bundle: &Path, most: u64) -> Result<()> {
    let mib = size(bundle)?.div_ceil(1 << 20);
    let dir = bundle.display();
    ensure!(mib <= most, "{dir} has {mib} MiB: more than {most}, the most that it may have");
    println!("{dir}: {mib} MiB. There, with Python's torch: python3 run.py --help");
    Ok(())
}

/// The size of all files in a folder in bytes.
fn size(dir: &Path) -> Result<u64> {
    let mut sum = 0;
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        sum += if path.is_dir() { size(&path)? } else { path.metadata()?.len() };
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_artifacts_with_an_executable_are_programs() {
        let messages = "\
{\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"tch\"},\"executable\":null}
{\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"scaler\"},\"executable\":\"/t/scaler-1\"}
{\"reason\":\"build-finished\",\"success\":true}
not JSON";
        let scaler = Program { name: "scaler".into(), path: "/t/scaler-1".into() };
        assert_eq!(programs(messages), [scaler]);
    }

    #[test]
    fn the_script_contains_its_torch_version() {
        assert!(RUN.contains("@TORCH@"));
    }

    #[test]
    fn the_programs_of_a_lease_are_those_that_its_steps_name() {
        let plan = r#"{"calls": [{"stages": [{"steps": ["python a.py", "tests/steps/scaler gradients::"]}]},
            {"stages": [{"steps": ["check --code 1 tests/steps/optim x/y", "bench/gpu --bench step"]}]}]}"#;
        let programs: Vec<_> = leased(plan).unwrap().into_iter().collect();
        assert_eq!(programs, ["bench/gpu", "tests/steps/optim", "tests/steps/scaler"]);
    }

    /// A file, or a folder with a main.rs.
    fn source(program: &str) -> Option<PathBuf> {
        let program = program.replace("bench/", "benches/");
        let path = paths::root().join(program);
        [path.with_extension("rs"), path.join("main.rs")].into_iter().find(|path| path.is_file())
    }

    #[test]
    fn a_lease_names_programs_that_exist() {
        for program in leased(LEASE).unwrap() {
            assert!(source(&program).is_some(), "{program}");
        }
    }

    /// That a fault, a crash and a hang end nothing else, that a call ends in time, and that no claim is stale.
    #[test]
    fn the_scripts_pass_their_tests() {
        let tests = paths::root().join("xtask/src/bundle/tests.py");
        let mut python = Command::new("python3");
        process::run(python.arg("-B").arg(tests).arg("--quiet")).unwrap();
    }
}

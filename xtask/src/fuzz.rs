//! `cargo xtask fuzz`: runs the readers of files on the inputs that libFuzzer generates.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::args::Args;
use crate::workspace::Workspace;
use crate::{paths, process};

/// The coverage options that libFuzzer needs, the same as cargo-fuzz's. Stable compilers support them, too.
const FLAGS: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
                     -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
                     -Cllvm-args=-sanitizer-coverage-pc-table \
                     -Cllvm-args=-sanitizer-coverage-trace-compares";

/// The limits for one input, in MB, seconds and bytes.
const LIMITS: [&str; 3] = ["-rss_limit_mb=4096", "-timeout=20", "-max_len=16384"];

/// `cargo xtask fuzz [files] [seconds]`.
pub(crate) fn run(mut args: Args) -> Result<()> {
    let mut next = args.next();
    let only_files = next.as_deref() == Some("files");
    if only_files {
        next = args.next();
    }
    let seconds = next.unwrap_or_else(|| "60".to_owned());
    args.end()?;
    let seconds = seconds
        .parse()
        .with_context(|| format!("seconds must be a whole number, not `{seconds}`"))?;
    if only_files { files(seconds) } else { checkpoints(&Workspace::announced(None)?, seconds) }
}

/// How many seconds the checks fuzz.
pub(crate) const BRIEFLY: u32 = 10;

/// Fuzzes the files for a moment, where that is possible.
pub(crate) fn files_briefly() -> Result<()> {
    if cfg!(target_os = "linux") { files(BRIEFLY) } else { Ok(()) }
}

/// Builds the targets that open files and folders, without libtorch, and runs each for half of this time.
fn files(seconds: u32) -> Result<()> {
    ["files", "folder"].into_iter().try_for_each(|bin| {
        let cargo = process::cargo(&paths::root(), "run --locked --package torch-files-fuzz");
        fuzz(cargo, bin, &paths::root(), seconds.div_ceil(2))
    })
}

/// Builds the target that restores checkpoints, and runs it for this time.
pub(crate) fn checkpoints(workspace: &Workspace, seconds: u32) -> Result<()> {
    let mut cargo = workspace.cargo("run --package fuzz");
    cargo.env("LD_LIBRARY_PATH", workspace.libtorch.lib());
    fuzz(cargo, "checkpoint", &workspace.dir, seconds)
}

/// Runs a target, given the command that builds it, on the seeds of the repository and the corpus of all targets.
fn fuzz(mut fuzz: Command, bin: &str, dir: &Path, seconds: u32) -> Result<()> {
    let folder = paths::target().join("fuzz");
    let corpus = paths::make(folder.join("corpus"))?;
    fuzz.args(["--bin", bin, "--"]).arg(corpus).args(LIMITS);
    fuzz.arg(format!("-max_total_time={seconds}"));
    fuzz.arg(format!("-artifact_prefix={}/", folder.display()));
    for seeds in ["safetensors", "torch", "folder"] {
        fuzz.arg(dir.join("fuzz/seeds").join(seeds));
    }
    process::run(fuzz.env("RUSTC_WORKSPACE_WRAPPER", instrumented(&folder)?))
}

/// Writes a program that starts rustc with the coverage options. Only the crates of this repository are compiled by it:
/// dependencies are those of the tests.
fn instrumented(folder: &Path) -> Result<PathBuf> {
    let build_scripts = r#"case " $* " in *" build_script_build "*) exec "$@";; esac"#;
    process::script(&folder.join("rustc"), &format!("{build_scripts}\nexec \"$@\" {FLAGS}\n"))
}

//! `cargo xtask fuzz`: runs the checkpoint readers on the inputs that libFuzzer generates.

use std::fs;
use std::path::{Path, PathBuf};

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

/// `cargo xtask fuzz [seconds]`.
pub(crate) fn run(mut args: Args) -> Result<()> {
    let seconds = args.next().unwrap_or_else(|| "60".to_owned());
    args.end()?;
    let seconds = seconds
        .parse()
        .with_context(|| format!("seconds must be a whole number, not `{seconds}`"))?;
    fuzz(&Workspace::announced(None)?, seconds)
}

/// Builds the target and runs it for this time.
pub(crate) fn fuzz(workspace: &Workspace, seconds: u32) -> Result<()> {
    let folder = paths::target().join("fuzz");
    let corpus = folder.join("corpus");
    fs::create_dir_all(&corpus).with_context(|| format!("{} cannot be made", corpus.display()))?;
    let mut fuzz = workspace.cargo("run");
    fuzz.args(["--package", "fuzz", "--bin", "checkpoint", "--"]).arg(&corpus).args(LIMITS);
    fuzz.arg(format!("-max_total_time={seconds}"));
    fuzz.arg(format!("-artifact_prefix={}/", folder.display()));
    for seeds in ["safetensors", "torch"] {
        fuzz.arg(workspace.dir.join("fuzz/seeds").join(seeds));
    }
    fuzz.env("LD_LIBRARY_PATH", workspace.libtorch.lib());
    process::run(fuzz.env("RUSTC_WORKSPACE_WRAPPER", instrumented(&folder)?))
}

/// Writes a program that starts rustc with the coverage options. Only the crates of this repository are compiled by it:
/// dependencies are those of the tests.
fn instrumented(folder: &Path) -> Result<PathBuf> {
    let build_scripts = r#"case " $* " in *" build_script_build "*) exec "$@";; esac"#;
    process::script(&folder.join("rustc"), &format!("{build_scripts}\nexec \"$@\" {FLAGS}\n"))
}

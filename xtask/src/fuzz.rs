//! `cargo xtask fuzz`: runs the checkpoint readers on the inputs that libFuzzer generates.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result};

use crate::args::Args;
use crate::process;
use crate::workspace::{self, Workspace};

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
    let target = workspace::target().join("fuzz");
    let host = host()?;
    let mut build = workspace.cargo("build");
    build.args(["--release", "--manifest-path", "fuzz/Cargo.toml"]);
    // With an explicit target, build scripts and macros are built without the coverage options.
    build.args(["--target", &host]).env("CARGO_TARGET_DIR", &target).env("RUSTFLAGS", FLAGS);
    process::run(&mut build)?;

    let corpus = target.join("corpus");
    fs::create_dir_all(&corpus).with_context(|| format!("{} cannot be made", corpus.display()))?;
    let mut fuzz = Command::new(target.join(host).join("release/checkpoint"));
    fuzz.current_dir(&target).arg(&corpus).args(LIMITS).arg(format!("-max_total_time={seconds}"));
    for seeds in ["safetensors", "torch"] {
        fuzz.arg(workspace.dir.join("fuzz/seeds").join(seeds));
    }
    fuzz.env("LD_LIBRARY_PATH", workspace.libtorch.lib());
    process::run(&mut fuzz)
}

/// The target triple of this machine.
fn host() -> Result<String> {
    let version = process::read(Command::new("rustc").arg("-vV"))?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("rustc does not say what its host is")?.to_owned())
}

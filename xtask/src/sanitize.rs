//! `cargo xtask sanitize`: runs tests with the C++ under AddressSanitizer and UndefinedBehaviorSanitizer.

use std::collections::BTreeMap;
use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::args::Args;
use crate::workspace::Workspace;
use crate::{compiled, compiler, paths, process};

/// Tests that pass raw pointers to the shim, and need no Python. The modules that are left out call the same functions
/// as others, thousands of times.
const TESTS: [&str; 2] = [
    "--lib",
    "--test=files --test=steps -- tensors:: optim:: scaler:: --skip=::programs:: --skip=low_bit::histories:: \
     --skip=low_bit::losses::",
];

/// What finds reads and writes outside of memory, leaks and undefined behaviour. The virtual tables of libtorch's
/// classes are not ours to check. Only the reports name lines of the sources, so that no other build has debug
/// information.
const FLAGS: &str = "-fsanitize=address,undefined -fno-sanitize=vptr \
                     -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1";

/// Changes the crate's profile, so that cargo writes this build to other files than the build without sanitizers, whose
/// programs may be running. 16 is also the compiler's own choice where compilation is not incremental.
const OWN_FILES: &str = "profile.dev.package.tch-amp.codegen-units=16";

/// The folders of `csrc/` that are units of their own.
const OWN_UNITS: [&str; 5] = ["distributed", "insight", "jit", "kernels", "optim"];

/// The reports that the planted faults of `src/ffi/tests/sanitized.rs` must cause.
const PLANTED: [(&str, &str); 4] = [
    ("writes_behind_memory", "heap-buffer-overflow"),
    ("writes_to_freed_memory", "heap-use-after-free"),
    ("overflows_an_integer", "signed integer overflow"),
    ("loses_memory", "detected memory leaks"),
];

/// `cargo xtask sanitize`.
pub(crate) fn run(args: Args) -> Result<()> {
    let workspace = Workspace::announced(None)?;
    match &args.rest()[..] {
        [] => sanitize(&workspace),
        others => process::run(cargo(&workspace, true)?.args(others)),
    }
}

/// The part that every run of the tests includes.
fn sanitize(workspace: &Workspace) -> Result<()> {
    if !cfg!(target_os = "linux") {
        eprintln!("WARNING: the sanitizers are SKIPPED: they are set up for Linux only");
        return Ok(());
    }
    let leaks = planted(workspace)?;
    TESTS
        .into_iter()
        .try_for_each(|tests| process::run(cargo(workspace, leaks)?.args(tests.split(' '))))
}

/// Compiles the C++ with clang++ as well, with warnings as errors: these folders as one unit each, as build.rs does,
/// and all others as another. Builds use g++ unless another compiler is set.
pub(crate) fn compile(workspace: &Workspace) -> Result<()> {
    if process::first_line(Command::new("clang++").arg("--version")).is_none() {
        eprintln!("WARNING: csrc/ is NOT COMPILED with clang++, which is not here");
        return Ok(());
    }
    let mut units = BTreeMap::new();
    for source in paths::files_below("csrc", ".cpp")? {
        let folder = source.parent().and_then(Path::file_name).unwrap_or_default();
        let own = OWN_UNITS.into_iter().find(|name| folder == *name);
        let unit = units.entry(own).or_insert_with(|| clang(&workspace.libtorch.root));
        unit.arg("-include").arg(source);
    }
    compiled::run_together(units.into_values().collect())
}

/// clang++ that reads what it is told to include, and compiles nothing.
fn clang(libtorch: &Path) -> Command {
    let include = libtorch.join("include");
    let csrc = paths::root().join("csrc");
    let mut command = Command::new("clang++");
    command.args(["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]);
    command.args(["CUDA", "INSIGHT", "TESTING"].map(|name| format!("-DTAMP_WITH_{name}")));
    command.arg("-isystem").arg(&include);
    command.arg("-isystem").arg(include.join("torch/csrc/api/include"));
    command.arg("-isystem").arg(csrc.join("distributed/gloo_headers"));
    command.arg("-iquote").arg(csrc).args(["-x", "c++", "/dev/null"]);
    command
}

/// Checks that each sanitizer finds its planted fault. Returns whether leaks can be detected, for which the threads of
/// the program are stopped as by a debugger; some containers forbid that.
fn planted(workspace: &Workspace) -> Result<bool> {
    let mut leaks = true;
    for (test, finding) in PLANTED {
        let test = format!("ffi::tests::sanitized::{test}");
        let mut cargo = cargo(workspace, true)?;
        cargo.args(["--lib", "--", "--exact", "--ignored", "--nocapture", &test]);
        let output = cargo.output().context("cargo cannot be run")?;
        let text = String::from_utf8_lossy(&output.stderr);
        if text.contains("LeakSanitizer has encountered a fatal error") {
            eprintln!(
                "WARNING: leaks are NOT LOOKED FOR: this machine does not let a process be traced"
            );
            leaks = false;
            continue;
        }
        ensure!(
            !output.status.success() && text.contains(finding),
            "the sanitizers did not find {finding:?} in `{test}`:\n{text}"
        );
        println!("{finding} is found");
    }
    Ok(leaks)
}

/// `cargo test` with the C++ under sanitizers. The options exclude libtorch itself, which is built without them.
fn cargo(workspace: &Workspace, leaks: bool) -> Result<Command> {
    let mut cargo = workspace.test(&format!("--package tch-amp --config {OWN_FILES}"));
    let leaks = u8::from(leaks);
    let options = format!("detect_leaks={leaks}:detect_odr_violation=0:alloc_dealloc_mismatch=0");
    // Only for the tests, not for cargo and compilers, which the libraries would slow down.
    let runner = format!(
        "env LD_PRELOAD={}:{} ASAN_OPTIONS={options} UBSAN_OPTIONS=print_stacktrace=1",
        library("libasan.so")?.display(),
        library("libubsan.so")?.display()
    );
    let target = format!("{}_UNKNOWN_LINUX_GNU", env::consts::ARCH.to_uppercase());
    cargo.env(format!("CARGO_TARGET_{target}_RUNNER"), runner).env("TCH_AMP_SANITIZE", FLAGS);
    // A Python that a test starts would be sanitized, too.
    cargo.env_remove("TCH_AMP_PYTHON").env_remove("TCH_AMP_REQUIRE_PYTHON");
    Ok(cargo)
}

/// The path of a library of the compiler.
fn library(name: &str) -> Result<PathBuf> {
    let path = process::read(compiler::command().arg(format!("-print-file-name={name}")))?;
    let path = PathBuf::from(path);
    if !path.is_absolute() {
        bail!("the C++ compiler has no {name}; install the sanitizers of g++ (libasan, libubsan)");
    }
    Ok(path)
}

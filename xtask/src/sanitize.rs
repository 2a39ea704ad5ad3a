//! `cargo xtask sanitize`: runs tests with the C++ under AddressSanitizer and UndefinedBehaviorSanitizer.

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::{env, fs};

use anyhow::{Context, Result, bail, ensure};

use crate::args::Args;
use crate::workspace::{self, Workspace};
use crate::{process, tools};

/// Tests that pass raw pointers to the shim, and need no Python.
const TESTS: [&str; 4] = ["--lib", "--test=tensors", "--test=optim", "--test=scaler"];

/// What finds reads and writes outside of memory, leaks and undefined behaviour. The virtual tables of libtorch's
/// classes are not ours to check. Only the reports name lines of the sources, so that no other build has debug
/// information.
const FLAGS: &str = "-fsanitize=address,undefined -fno-sanitize=vptr \
                     -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1";

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
    let others: Vec<_> = args.rest();
    if others.is_empty() {
        compile(&workspace)?;
        return sanitize(&workspace);
    }
    check(&workspace, true, &others)
}

/// The part that every run of the tests includes.
pub(crate) fn sanitize(workspace: &Workspace) -> Result<()> {
    if !cfg!(target_os = "linux") {
        eprintln!("WARNING: the sanitizers are SKIPPED: they are set up for Linux only");
        return Ok(());
    }
    let leaks = planted(workspace)?;
    check(workspace, leaks, &TESTS.map(String::from))
}

/// Compiles the C++ with clang++ as well, with warnings as errors. Builds use g++ unless another compiler is set.
pub(crate) fn compile(workspace: &Workspace) -> Result<()> {
    let version = Command::new("clang++").arg("--version").stdout(Stdio::null()).status();
    if !version.is_ok_and(|status| status.success()) {
        eprintln!("WARNING: csrc/ is NOT COMPILED with clang++, which is not here");
        return Ok(());
    }
    let include = workspace.libtorch.root.join("include");
    let mut sources = tools::cxx_files(&["csrc"])?;
    sources.retain(|path| path.extension().is_some_and(|end| end == "cpp"));
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    let parts = sources.chunks(sources.len().div_ceil(threads).max(1));
    let header = precompile(&include)?;
    let done = thread::scope(|scope| {
        let (include, header) = (&include, &header);
        let check = move |part: &[PathBuf]| {
            part.iter().try_for_each(|source| {
                let mut command = clang(include);
                command.args(["-fsyntax-only", "-include-pch"]).arg(header).arg(source);
                process::run(&mut command)
            })
        };
        let running: Vec<_> = parts.map(|part| scope.spawn(move || check(part))).collect();
        let done = running.into_iter().map(|part| match part.join() {
            Ok(done) => done,
            Err(_) => bail!("a thread that compiles panicked"),
        });
        done.collect()
    });
    fs::remove_file(&header).with_context(|| format!("{} cannot be removed", header.display()))?;
    done
}

/// Precompiles ATen.h once for all sources.
fn precompile(include: &Path) -> Result<PathBuf> {
    let folder = workspace::target();
    fs::create_dir_all(&folder).with_context(|| format!("{} cannot be made", folder.display()))?;
    let precompiled = folder.join("clang.pch");
    let mut command = clang(include);
    command.args(["-x", "c++-header"]).arg(include.join("ATen/ATen.h"));
    process::run(command.arg("-o").arg(&precompiled))?;
    Ok(precompiled)
}

fn clang(include: &Path) -> Command {
    let mut command = Command::new("clang++");
    command.args(["-std=c++17", "-Wall", "-Wextra", "-Werror"]);
    command.args(["CUDA", "INSIGHT", "TESTING"].map(|name| format!("-DTAMP_WITH_{name}")));
    command.arg("-isystem").arg(include);
    command.arg("-isystem").arg(include.join("torch/csrc/api/include"));
    command.arg("-isystem").arg(workspace::root().join("csrc/distributed/gloo_headers"));
    command.arg("-iquote").arg(workspace::root().join("csrc"));
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

fn check(workspace: &Workspace, leaks: bool, tests: &[String]) -> Result<()> {
    process::run(cargo(workspace, leaks)?.args(tests))
}

/// `cargo test` with the C++ under sanitizers. The options exclude libtorch itself, which is built without them.
fn cargo(workspace: &Workspace, leaks: bool) -> Result<Command> {
    let mut cargo = workspace.cargo_full("test");
    cargo.args(["--package", "tch-amp"]);
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
    let mut compiler = Command::new(env::var_os("CXX").unwrap_or_else(|| "c++".into()));
    let path = process::read(compiler.arg(format!("-print-file-name={name}")))?;
    let path = PathBuf::from(path.trim());
    if !path.is_absolute() {
        bail!("the C++ compiler has no {name}; install the sanitizers of g++ (libasan, libubsan)");
    }
    Ok(path)
}

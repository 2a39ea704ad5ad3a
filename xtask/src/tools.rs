//! Programs that a build or a check needs: the C++ compiler and clang-format.

use std::path::PathBuf;
use std::process::Command;
use std::{env, fs};

use anyhow::{Context, Result};

use crate::args::Args;
use crate::process;
use crate::venv::Venv;
use crate::{links, null_cuda, pictures, simulation, workspace};

/// The format depends on the release of clang-format, so one release is fixed.
const CLANG_FORMAT: &str = "20.1.8";

/// The C++ compiler that the `cc` crate uses, and its version.
pub(crate) fn cxx() -> Result<String> {
    let compiler = env::var("CXX").unwrap_or_else(|_| "c++".into());
    let mut words = compiler.split_whitespace();
    let mut command = Command::new(words.next().unwrap_or("c++"));
    let version = process::first_line(command.args(words).arg("--version")).with_context(|| {
        format!(
            "there is no C++ compiler (`{compiler} --version` does not run): \
             install one, such as with `apt install g++`, or set CXX"
        )
    })?;
    Ok(format!("{version} ({compiler})"))
}

/// `cargo xtask fmt`: formats the Rust and the C++, and puts the pictures into the documentation.
pub(crate) fn format(args: Args) -> Result<()> {
    args.end()?;
    pictures::write()?;
    links::write()?;
    rustfmt(&[])?;
    clang_format(&["-i"])
}

/// Fails if a Rust file is not formatted.
pub(crate) fn check_rust_format() -> Result<()> {
    rustfmt(&["--check"]).context("run `cargo xtask fmt`")
}

/// Fails if a C++ file is not formatted.
pub(crate) fn check_cxx_format() -> Result<()> {
    clang_format(&["--dry-run", "-Werror"]).context("run `cargo xtask fmt`")
}

fn rustfmt(arguments: &[&str]) -> Result<()> {
    let mut fmt = process::cargo();
    process::run(fmt.args(["fmt", "--all"]).args(arguments).current_dir(workspace::root()))
}

fn clang_format(arguments: &[&str]) -> Result<()> {
    let files = cxx_files(&["csrc", simulation::SOURCES, null_cuda::SOURCES, "tests/real_cuda"])?;
    if files.is_empty() {
        return Ok(());
    }
    let mut command = Command::new(clang_format_program()?);
    process::run(command.args(arguments).args(files).current_dir(workspace::root()))
}

/// The C++ files in these folders of the repository and the folders in them, sorted.
pub(crate) fn cxx_files(folders: &[&str]) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut folders: Vec<_> = folders.iter().map(|name| workspace::root().join(name)).collect();
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder)
            .with_context(|| format!("{} cannot be read", folder.display()))?;
        for entry in entries {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|kind| kind == "cpp" || kind == "h") {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

/// The installed clang-format if it is the fixed release; otherwise that release from PyPI.
fn clang_format_program() -> Result<PathBuf> {
    let installed = process::first_line(Command::new("clang-format").arg("--version"));
    if installed.is_some_and(|version| version.contains(CLANG_FORMAT)) {
        return Ok("clang-format".into());
    }
    let venv = Venv::clang_format(CLANG_FORMAT)?;
    venv.ensure()?;
    Ok(venv.program("clang-format"))
}

//! `cargo xtask fmt`: the format of the Rust and the C++.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use crate::args::Args;
use crate::paths::files_below;
use crate::venv::Venv;
use crate::{links, paths, pictures, process};

/// The format depends on the release of clang-format, so one release is fixed.
const CLANG_FORMAT: &str = "20.1.8";

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
    process::run(process::cargo(&paths::root(), "fmt --all").args(arguments))
}

fn clang_format(arguments: &[&str]) -> Result<()> {
    let mut command = Command::new(clang_format_program()?);
    for folder in ["csrc", "testbench"] {
        command.args(files_below(folder, ".cpp")?).args(files_below(folder, ".h")?);
    }
    process::run(command.args(arguments).current_dir(paths::root()))
}

/// The installed clang-format if it is the fixed release; otherwise that release from PyPI.
fn clang_format_program() -> Result<PathBuf> {
    let installed = process::first_line(Command::new("clang-format").arg("--version"));
    if installed.is_some_and(|version| version.contains(CLANG_FORMAT)) {
        return Ok("clang-format".into());
    }
    Ok(Venv::new("clang-format", CLANG_FORMAT, 1)?.ensure()?.program("clang-format"))
}

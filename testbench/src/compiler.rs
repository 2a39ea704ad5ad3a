//! The C++ compiler.

use std::env;
use std::process::Command;

use anyhow::{Context, Result};

use crate::process;

/// The C++ compiler that the `cc` crate uses, and its version.
pub fn cxx() -> Result<String> {
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

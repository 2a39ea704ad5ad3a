//! The C++ compiler.

use std::env;
use std::process::Command;

use anyhow::{Context, Result};

use crate::process;

/// The C++ compiler that the `cc` crate uses, with the options that CXX may contain.
pub fn command() -> Command {
    let words = name();
    let mut words = words.split_whitespace();
    let mut command = Command::new(words.next().unwrap_or("c++"));
    command.args(words);
    command
}

/// Its version.
pub fn version() -> Result<String> {
    let name = name();
    let version = process::first_line(command().arg("--version")).with_context(|| {
        format!(
            "there is no C++ compiler (`{name} --version` does not run): install one, such as with `apt install g++`, \
             or set CXX"
        )
    })?;
    Ok(format!("{version} ({name})"))
}

fn name() -> String {
    env::var("CXX").unwrap_or_else(|_| "c++".into())
}

//! The C++ compiler, and the sources that it compiles.

use std::path::PathBuf;
use std::process::Command;
use std::{env, fs};

use anyhow::{Context, Result};

use crate::{paths, process};

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

/// The C++ files in these folders of the repository and the folders in them, sorted.
pub fn cxx_files(folders: &[&str]) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut folders: Vec<_> = folders.iter().map(|name| paths::root().join(name)).collect();
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

//! The sources of crates, which cargo has wherever an example builds, as texts to learn from.

use anyhow::{Context, Result};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// Returns the folder `src` of each of these crates, as cargo knows them; `None` if cargo cannot be asked, because the
/// program was not started by `cargo run` in a checkout.
pub fn sources(crates: &[&str]) -> Option<Vec<PathBuf>> {
    let cargo = |args: &[&str]| {
        let mut command = Command::new(env::var_os("CARGO")?);
        let output = command.args(args).current_dir(env!("CARGO_MANIFEST_DIR")).output().ok()?;
        output.status.success().then_some(output.stdout)
    };
    let version = String::from_utf8(cargo(&["-vV"])?).ok()?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "))?;
    // Cargo has not downloaded the packages of other platforms, and fails without them unless they are left out.
    let format = ["metadata", "--format-version", "1", "--offline", "--filter-platform", host];
    let metadata: Value = serde_json::from_slice(&cargo(&format)?).ok()?;
    let packages = metadata["packages"].as_array()?;
    let folder = |name: &&str| {
        // Of several versions the last one.
        let mut found = packages.iter().filter(|package| package["name"] == *name);
        let manifest = Path::new(found.next_back()?["manifest_path"].as_str()?);
        Some(manifest.parent()?.join("src"))
    };
    crates.iter().map(folder).collect()
}

/// Returns all Rust files in a folder and the folders in it.
pub fn rust_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let entries =
        fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() {
            files.extend(rust_files(&path)?);
        } else if path.extension().is_some_and(|end| end == "rs") {
            files.push(path);
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn cargo_says_where_crates_are_and_a_missing_one_is_noticed() {
        let [tch, anyhow] = sources(&["tch", "anyhow"]).unwrap().try_into().unwrap();
        assert!(rust_files(&tch).unwrap().contains(&tch.join("nn/var_store.rs")));
        assert!(anyhow.join("lib.rs").is_file());
        assert_eq!(sources(&["tch", "there is no such crate"]), None);
    }
}

//! The minimum Rust version: what Cargo.toml promises must hold for every locked dependency.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::versions::{PAIRS, Pair, numbers};
use crate::{process, shadow, workspace};

/// Checks every lock, and compiles with the promised version if rustup has it.
pub(crate) fn check() -> Result<()> {
    let root = workspace::root();
    let locked = Pair::locked(&root)?;
    let ours = check_dependencies(&root)?;
    for pair in PAIRS.into_iter().filter(|pair| *pair != locked) {
        check_dependencies(&shadow::make(&workspace::target(), pair)?)?;
    }
    println!("no locked dependency asks for more than Rust {ours}");
    compile(&ours)
}

/// Returns the version that the workspace in `dir` promises, if its dependencies fulfil the promise.
fn check_dependencies(dir: &Path) -> Result<String> {
    let mut metadata = process::cargo();
    metadata.args(["metadata", "--locked", "--all-features", "--format-version", "1"]);
    let metadata = process::read(metadata.current_dir(dir))?;
    let metadata = serde_json::from_str(&metadata).context("cargo metadata prints no JSON")?;
    let ours = rust_version(&metadata, "tch-amp").context("Cargo.toml has no rust-version")?;
    let newer = newer_than(&ours, &metadata);
    if !newer.is_empty() {
        bail!("rust-version is {ours}, but these need a newer Rust: {}", newer.join(", "));
    }
    Ok(ours)
}

fn packages(metadata: &Value) -> impl Iterator<Item = &Value> {
    metadata["packages"].as_array().into_iter().flatten()
}

fn rust_version(metadata: &Value, name: &str) -> Option<String> {
    let package = packages(metadata).find(|package| package["name"] == name)?;
    package["rust_version"].as_str().map(str::to_owned)
}

/// The packages that declare a newer Rust than `ours`.
fn newer_than(ours: &str, metadata: &Value) -> Vec<String> {
    let mut newer = Vec::new();
    for package in packages(metadata) {
        let theirs = package["rust_version"].as_str().unwrap_or("0");
        if numbers(theirs) > numbers(ours) {
            let name = package["name"].as_str().unwrap_or("a package");
            newer.push(format!("{name} ({theirs})"));
        }
    }
    newer
}

/// Compiles everything except the C++ with Rust `version`, if it is installed.
fn compile(version: &str) -> Result<()> {
    let Some(toolchain) = installed(version) else {
        println!(
            "not compiled with Rust {version}: `rustup toolchain install {version}` adds that"
        );
        return Ok(());
    };
    let mut check = Command::new("rustup");
    check.args(["run", &toolchain, "cargo", "check", "--locked", "--workspace", "--all-targets"]);
    check.args(["--features", "doc-only,full"]).current_dir(workspace::root());
    // Without the path of the newer cargo that runs xtask, which cargo would otherwise inherit.
    check.env_remove("CARGO").env_remove("RUSTC").env("CARGO_TARGET_DIR", target());
    process::run(&mut check)
}

/// The folder of the outputs. If two compilers shared one, every run would build everything again.
fn target() -> PathBuf {
    workspace::target().join("msrv")
}

/// The name of the installed toolchain of `version`.
fn installed(version: &str) -> Option<String> {
    let list = process::read(Command::new("rustup").args(["toolchain", "list"])).ok()?;
    find_toolchain(&list, version)
}

fn find_toolchain(list: &str, version: &str) -> Option<String> {
    let mut names = list.lines().filter_map(|line| line.split_whitespace().next());
    let wanted = numbers(version);
    names
        .find(|name| {
            let release = name.split('-').next().unwrap_or(name);
            release.contains('.') && numbers(release) == wanted
        })
        .map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_dependency_that_needs_a_newer_rust_is_named() {
        let metadata = json!({"packages": [
            {"name": "tch-amp", "rust_version": "1.88"},
            {"name": "same", "rust_version": "1.88.0"},
            {"name": "old", "rust_version": "1.9"},
            {"name": "silent", "rust_version": null},
            {"name": "new", "rust_version": "1.89"},
        ]});
        assert_eq!(rust_version(&metadata, "tch-amp").as_deref(), Some("1.88"));
        assert_eq!(newer_than("1.88", &metadata), ["new (1.89)"]);
    }

    #[test]
    fn the_toolchain_is_found_by_its_number() {
        let list = "stable-x86_64-unknown-linux-gnu (active, default)\n\
                    1.95.0-x86_64-unknown-linux-gnu\n1.88-x86_64-unknown-linux-gnu\n";
        let found = find_toolchain(list, "1.88");
        assert_eq!(found.as_deref(), Some("1.88-x86_64-unknown-linux-gnu"));
        assert_eq!(find_toolchain(list, "1.89"), None);
    }
}

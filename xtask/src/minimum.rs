//! The oldest versions that Cargo.toml promises: of Rust, and of each dependency, in a lock.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::versions::{Pair, numbers};
use crate::{committed, paths, process, workspace};

const REFRESH: &str = "run `cargo xtask lock` and commit it";

/// The path of the committed lock.
fn lock() -> PathBuf {
    paths::root().join("xtask/lock/minimal.lock")
}

/// Copies the committed lock to the unpacked packages, if it has the oldest version of each direct dependency.
pub(crate) fn apply(packed: &Path) -> Result<()> {
    let oldest = generate(packed).and_then(|()| direct(packed))?;
    workspace::copy(&lock(), &packed.join("Cargo.lock"))?;
    let stale = || format!("{} is not of this Cargo.toml: {REFRESH}", lock().display());
    let changes = committed::changes(&direct(packed).with_context(stale)?, &oldest);
    ensure!(changes.is_empty(), "{}\n{}", stale(), changes.join("\n"));
    Ok(())
}

/// Rewrites the lock by means of the unpacked packages.
pub(crate) fn rewrite(packed: &Path) -> Result<()> {
    generate(packed)?;
    workspace::copy(&packed.join("Cargo.lock"), &lock())?;
    println!("wrote {}", lock().display());
    Ok(())
}

/// Locks the oldest version of each direct dependency of a workspace. The option is unstable.
fn generate(packed: &Path) -> Result<()> {
    let mut cargo = process::cargo(packed, "generate-lockfile --quiet -Z direct-minimal-versions");
    process::run(cargo.env("RUSTC_BOOTSTRAP", "1"))
        .context("raise in Cargo.toml what is too old for another dependency")
}

/// A line for each direct dependency of a workspace, with the version in its lock.
fn direct(packed: &Path) -> Result<String> {
    let tree = "tree --locked --workspace --all-features --target all --depth 1 --prefix none";
    process::read(&mut process::cargo(packed, tree))
}

/// Checks every lock, and compiles with the promised version if rustup has it.
pub(crate) fn check_rust() -> Result<()> {
    let ours = check_dependencies(&paths::root())?;
    for pair in Pair::others()? {
        check_dependencies(&workspace::make(pair)?)?;
    }
    println!("no locked dependency asks for more than Rust {ours}");
    compile(&ours)
}

/// Returns the version that the workspace in `dir` promises, if its dependencies fulfil the promise.
fn check_dependencies(dir: &Path) -> Result<String> {
    let metadata = workspace::metadata(dir, "--locked --all-features")?;
    let packages = metadata["packages"].as_array().context("cargo metadata has no packages")?;
    let ours = packages.iter().find(|package| package["name"] == "tch-amp");
    let ours = ours.and_then(|package| package["rust_version"].as_str());
    let ours = ours.context("Cargo.toml has no rust-version")?;
    let newer = newer_than(ours, packages).join(", ");
    ensure!(newer.is_empty(), "rust-version is {ours}, but these need a newer Rust: {newer}");
    Ok(ours.to_owned())
}

/// The packages that declare a newer Rust than `ours`.
fn newer_than(ours: &str, packages: &[Value]) -> Vec<String> {
    let newer = packages.iter().filter_map(|package| {
        let theirs = package["rust_version"].as_str()?;
        let is_newer = numbers(theirs) > numbers(ours);
        is_newer.then_some(format!("{} ({theirs})", package["name"].as_str()?))
    });
    newer.collect()
}

/// Compiles everything except the C++ with Rust `version`, if it is installed.
fn compile(version: &str) -> Result<()> {
    let of = |name: &String, words: &str| {
        let mut rustup = Command::new("rustup");
        rustup.args(["run", name, "cargo"]).args(words.split(' '));
        rustup
    };
    let mut names = [version.to_owned(), format!("{version}.0")].into_iter();
    let is_installed = |name: &String| process::read(&mut of(name, "-V")).is_ok();
    let Some(toolchain) = names.find(is_installed) else {
        println!(
            "not compiled with Rust {version}: `rustup toolchain install {version}` adds that"
        );
        return Ok(());
    };
    let check = "check --locked --workspace --all-targets --features doc-only,full";
    let mut check = of(&toolchain, check);
    check.current_dir(paths::root());
    // If two compilers shared a folder of outputs, every run would build everything again.
    check.env("CARGO_TARGET_DIR", paths::target().join("msrv"));
    // Without the path of the newer cargo that runs xtask, which cargo would otherwise inherit.
    process::run(check.env_remove("CARGO").env_remove("RUSTC"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_dependency_that_needs_a_newer_rust_is_named() {
        let packages = [("old", "1.9"), ("same", "1.88.0"), ("new", "1.89")]
            .map(|(name, rust_version)| json!({"name": name, "rust_version": rust_version}));
        assert_eq!(newer_than("1.88", &packages), ["new (1.89)"]);
        assert!(newer_than("1.88", &[json!({"name": "silent", "rust_version": null})]).is_empty());
    }
}

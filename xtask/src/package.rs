//! The package: its contents, and that it builds and documents itself outside of the repository.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::args::Args;
use crate::{committed, minimum, paths, process, workspace};

pub(crate) const NAME: &str = "tch-amp";

/// The members that the crate depends on, which are packed with it and released before it.
pub(crate) const MEMBERS: [&str; 2] = ["torch-files", "run-report"];

/// What Cargo.toml says of the crate from its first release on.
const KEYS: [&str; 2] = ["repository", "documentation"];

/// The committed list of the package's files.
const LIST: &str = "xtask/package.txt";

/// `cargo xtask package`: rewrites the list, or with `--publishable` checks what a release needs.
pub(crate) fn run(mut args: Args) -> Result<()> {
    let publishable = args.flag("--publishable");
    args.end()?;
    if publishable { check_publishable() } else { committed::write(LIST, &files()?) }
}

/// Fails if the crate cannot be published as it is committed. Publishes nothing.
fn check_publishable() -> Result<()> {
    let package = manifest(NAME)?;
    let unset: Vec<_> = KEYS.into_iter().filter(|key| !package[*key].is_string()).collect();
    ensure!(unset.is_empty(), "set in Cargo.toml, below `[package]`: {}", unset.join(", "));
    let log = paths::read(&paths::root().join("CHANGELOG.md"))?;
    let version = version(NAME)?;
    ensure!(is_dated(&log, &version), "CHANGELOG.md has no entry of {version} with its date");
    let mut publish = process::cargo(&paths::root(), "publish --dry-run --no-verify");
    process::run(publish.args(selected()))
}

/// Whether the log has an entry of a version with its date, such as `## 0.1.0 - 2026-11-26`.
fn is_dated(log: &str, version: &str) -> bool {
    let entry = format!("## {version} - ");
    let dates = log.lines().filter_map(|line| line.strip_prefix(&*entry));
    dates.into_iter().any(|date| date.starts_with(|first: char| first.is_ascii_digit()))
}

/// Fails if the package's files differ from the list, or if one must not be in the package.
pub(crate) fn check_contents() -> Result<()> {
    let files = files()?;
    let stray: Vec<_> = files.lines().filter(|file| is_of_tests(file)).collect();
    let against = "tests are in the package, against `include` in Cargo.toml";
    ensure!(stray.is_empty(), "{against}: {stray:?}");
    let remedy = "if that is right, run `cargo xtask package` and commit the list";
    committed::check(LIST, &files, remedy)?;
    println!("{} files, as {LIST} says", files.lines().count());
    Ok(())
}

/// Every combination of the features that open a module.
const FEATURES: [&str; 5] =
    ["doc-only", "doc-only,insight", "doc-only,distributed", "doc-only,jit", FULL];

const FULL: &str = "doc-only,full";

/// Packs the crate, and checks it with each combination of features and documents the package, without libtorch and the
/// C++ like docs.rs, and with the oldest dependencies.
///
/// The C++, which takes minutes, is not compiled again: every other build compiles the same files of `csrc/`.
pub(crate) fn check_builds() -> Result<()> {
    let packed = packed()?;
    minimum::apply(&packed)?;
    for features in FEATURES {
        lint_library(&packed, features)?;
    }
    document(&packed, &format!("--package {NAME}"))
}

/// Documents the workspace with warnings as errors, without libtorch.
pub(crate) fn check_documentation() -> Result<()> {
    document(&paths::root(), "--workspace")
}

fn document(dir: &Path, packages: &str) -> Result<()> {
    let words = format!("doc --locked --features {FULL} --no-deps {packages}");
    process::run(without_libtorch(dir, &words).env("RUSTDOCFLAGS", "-D warnings"))
}

/// Lints every target of the workspace, and the crate with fewer features, without libtorch.
pub(crate) fn lint() -> Result<()> {
    for features in FEATURES.into_iter().filter(|features| *features != FULL) {
        lint_library(&paths::root(), features)?;
    }
    clippy(&paths::root(), FULL, "--workspace --all-targets")
}

fn lint_library(dir: &Path, features: &str) -> Result<()> {
    clippy(dir, features, &format!("--package {NAME} --lib"))
}

fn clippy(dir: &Path, features: &str, targets: &str) -> Result<()> {
    let words = format!("clippy --locked --features {features} {targets} -- -D warnings");
    process::run(&mut without_libtorch(dir, &words))
}

/// Runs the tests of the members, which need no libtorch. Those that compare with Python are skipped without one.
pub(crate) fn test_members() -> Result<()> {
    let mut tests = process::cargo(&paths::root(), "test --locked");
    // Tests without libtorch share nothing, so that they need not run one after the other as in `.cargo/config.toml`.
    let cores = thread::available_parallelism().map_or(1, usize::from);
    tests.env("RUST_TEST_THREADS", cores.to_string());
    process::run(tests.args(MEMBERS.iter().flat_map(|name| ["--package", name])))
}

/// Packs the crate with its members, and returns the folder of a workspace of the unpacked packages.
pub(crate) fn packed() -> Result<PathBuf> {
    let package = "package --no-verify --allow-dirty --offline --quiet";
    process::run(process::cargo(&paths::root(), package).args(selected()))?;
    let folder = paths::make_empty(paths::target().join("packed"))?;
    for package in MEMBERS.into_iter().chain([NAME]) {
        let archive = paths::target().join("package").join(unpacked(package)? + ".crate");
        let mut tar = Command::new("tar");
        process::run(tar.arg("-xzf").arg(archive).arg("-C").arg(&folder))?;
        // The profiles, which come last, would have no effect in a member.
        let manifest = folder.join(unpacked(package)?).join("Cargo.toml");
        let text = paths::read(&manifest)?;
        paths::write(&manifest, text.split("[profile.").next().unwrap_or(&text))?;
    }
    let workspace = "[workspace]\nmembers = [\"*-*\"]\nresolver = \"3\"\n".to_owned();
    paths::write(&folder.join("Cargo.toml"), &(workspace + &patches(&folder, &MEMBERS)?))?;
    Ok(folder)
}

/// The options that select the crate and its members.
fn selected() -> impl Iterator<Item = &'static str> {
    MEMBERS.into_iter().chain([NAME]).flat_map(|name| ["--package", name])
}

/// The part of a manifest that takes packed packages in place of those of the registry.
pub(crate) fn patches(packed: &Path, packages: &[&str]) -> Result<String> {
    let mut patches = String::from("\n[patch.crates-io]\n");
    for package in packages {
        let path = packed.join(unpacked(package)?).display().to_string();
        patches += &format!("{package} = {{ path = {path:?} }}\n");
    }
    Ok(patches)
}

/// The name of the folder of an unpacked package.
fn unpacked(package: &str) -> Result<String> {
    Ok(format!("{package}-{}", version(package)?))
}

/// The files that cargo would pack, sorted, a line for each. New files that were not added to git are included.
fn files() -> Result<String> {
    let list = format!("package --package {NAME} --list --allow-dirty --offline");
    let printed = process::read(&mut process::cargo(&paths::root(), &list))?;
    // Without a git repository, cargo leaves this file out.
    let files = printed.lines().filter(|file| *file != ".cargo_vcs_info.json");
    let mut files: Vec<_> = files.map(|file| format!("{file}\n")).collect();
    files.sort();
    Ok(files.concat())
}

/// Whether a file is a test or an oracle.
fn is_of_tests(file: &str) -> bool {
    let mut parts = file.split('/');
    parts.any(|part| ["tests", "tests.rs", "oracle"].contains(&part)) || file.ends_with(".py")
}

fn version(package: &str) -> Result<String> {
    let manifest = manifest(package)?;
    Ok(manifest["version"].as_str().context("the package has no version")?.to_owned())
}

/// What Cargo.toml says of a package, as cargo reads it.
fn manifest(name: &str) -> Result<Value> {
    let metadata = workspace::metadata(&paths::root(), "--no-deps --offline")?;
    let mut packages = metadata["packages"].as_array().into_iter().flatten();
    let package = packages.find(|package| package["name"] == name);
    Ok(package.with_context(|| format!("the workspace has no {name}"))?.clone())
}

/// `cargo` in `dir`, without libtorch. It has an output folder of its own, because the feature changes tch.
pub(crate) fn without_libtorch(dir: &Path, words: &str) -> Command {
    let mut cargo = process::cargo(dir, words);
    for name in ["LIBTORCH", "LIBTORCH_USE_PYTORCH", "LIBTORCH_INCLUDE", "LIBTORCH_LIB"] {
        cargo.env_remove(name);
    }
    cargo.env("CARGO_TARGET_DIR", paths::target().join("doc-only"));
    cargo
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_has_a_date() {
        let log = "## 0.2.0 - Unreleased\n\n## 0.1.0 - 2026-11-26\n";
        assert!(is_dated(log, "0.1.0") && !is_dated(log, "0.2.0") && !is_dated(log, "0.1"));
    }

    #[test]
    fn tests_and_oracles_are_not_in_the_package() {
        for file in
            ["tests/abi.rs", "src/ffi/tests/mod.rs", "src/a/tests.rs", "benches/oracle/a.py"]
        {
            assert!(is_of_tests(file), "{file}");
        }
        for file in ["src/lib.rs", "csrc/border/testing.cpp", "docs/guarantees.md"] {
            assert!(!is_of_tests(file), "{file}");
        }
    }
}

//! The package: its contents, and that it builds and documents itself outside of the repository.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::args::Args;
use crate::{minimum, paths, process};

const NAME: &str = "tch-amp";

/// The members that the crate depends on, which are packed with it and released before it.
const MEMBERS: [&str; 2] = ["torch-files", "run-report"];

/// What Cargo.toml says of the crate from its first release on.
const KEYS: [&str; 2] = ["repository", "documentation"];

/// The committed list of the package's files.
const LIST: &str = "xtask/package.txt";

const REFRESH: &str = "if that is right, run `cargo xtask package` and commit the list";

/// `cargo xtask package`: rewrites the list, or with `--publishable` checks what a release needs.
pub(crate) fn run(mut args: Args) -> Result<()> {
    let publishable = args.flag("--publishable");
    args.end()?;
    if publishable { check_publishable() } else { rewrite_list() }
}

/// Fails if the crate cannot be published as it is committed. Publishes nothing.
fn check_publishable() -> Result<()> {
    let package = manifest(NAME)?;
    let unset: Vec<_> = KEYS.into_iter().filter(|key| !package[*key].is_string()).collect();
    ensure!(unset.is_empty(), "set in Cargo.toml, below `[package]`: {}", unset.join(", "));
    let log = fs::read_to_string(paths::root().join("CHANGELOG.md"))?;
    let version = version(NAME)?;
    ensure!(is_dated(&log, &version), "CHANGELOG.md has no entry of {version} with its date");
    let mut publish = process::cargo();
    publish.args(["publish", "--dry-run", "--no-verify"]).args(selected());
    process::run(publish.current_dir(paths::root()))
}

/// Whether the log has an entry of a version with its date, such as `## 0.1.0 - 2026-11-26`.
fn is_dated(log: &str, version: &str) -> bool {
    let entry = format!("## {version} - ");
    let dates = log.lines().filter_map(|line| line.strip_prefix(&*entry));
    dates.into_iter().any(|date| date.starts_with(|first: char| first.is_ascii_digit()))
}

fn rewrite_list() -> Result<()> {
    let list = paths::root().join(LIST);
    fs::write(&list, lines(&files()?)).with_context(|| format!("{LIST} cannot be written"))?;
    println!("wrote {LIST}");
    Ok(())
}

/// Fails if the package's files differ from the list, or if one must not be in the package.
pub(crate) fn check_contents() -> Result<()> {
    let listed = fs::read_to_string(paths::root().join(LIST))
        .with_context(|| format!("{LIST} is missing: {REFRESH}"))?;
    let files = files()?;
    let stray: Vec<_> = files.iter().filter(|file| is_of_tests(file)).collect();
    ensure!(
        stray.is_empty(),
        "tests are in the package, against `include` in Cargo.toml: {stray:?}"
    );
    let changes = changes(&listed, &lines(&files));
    ensure!(
        changes.is_empty(),
        "the package is not as {LIST} says: {}: {REFRESH}",
        changes.join(", ")
    );
    println!("{} files, as {LIST} says", files.len());
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
    let unpacked = packed()?;
    minimum::apply(&unpacked)?;
    for features in FEATURES {
        let mut clippy = doc_only(&unpacked, "clippy", features);
        process::run(clippy.args(["--lib", "--", "-D", "warnings"]))?;
    }
    process::run(
        doc_only(&unpacked, "doc", FULL).arg("--no-deps").env("RUSTDOCFLAGS", "-D warnings"),
    )
}

/// Documents the workspace with warnings as errors, without libtorch.
pub(crate) fn check_documentation() -> Result<()> {
    let mut doc = doc_only(&paths::root(), "doc", FULL);
    process::run(doc.args(["--workspace", "--no-deps"]).env("RUSTDOCFLAGS", "-D warnings"))
}

/// Lints every target of the workspace, and the crate with fewer features, without libtorch.
pub(crate) fn lint() -> Result<()> {
    for features in FEATURES.into_iter().filter(|features| *features != FULL) {
        let mut clippy = doc_only(&paths::root(), "clippy", features);
        process::run(clippy.args(["--package", NAME, "--lib", "--", "-D", "warnings"]))?;
    }
    let mut clippy = doc_only(&paths::root(), "clippy", FULL);
    process::run(clippy.args(["--workspace", "--all-targets", "--", "-D", "warnings"]))
}

/// Runs the tests of the members, which need no libtorch. Those that compare with Python are skipped without one.
pub(crate) fn test_members() -> Result<()> {
    let mut tests = process::cargo();
    tests.args(["test", "--locked"]).args(MEMBERS.iter().flat_map(|name| ["--package", name]));
    process::run(process::on_all_cores(tests.current_dir(paths::root())))
}

/// Packs the crate with its members and unpacks it in another folder.
pub(crate) fn packed() -> Result<PathBuf> {
    let mut package = process::cargo();
    package.args(["package", "--no-verify", "--allow-dirty", "--offline", "--quiet"]);
    process::run(package.args(selected()).current_dir(paths::root()))?;
    unpack(&paths::target())
}

/// The options that select the crate and its members.
fn selected() -> impl Iterator<Item = &'static str> {
    MEMBERS.into_iter().chain([NAME]).flat_map(|name| ["--package", name])
}

/// The part of a manifest that takes each packed member, beside the packed crate, in place of the one of the registry.
pub(crate) fn patches(packed: &Path) -> Result<String> {
    let folder = packed.parent().context("the packed crate is in no folder")?;
    let mut patches = String::from("\n[patch.crates-io]\n");
    for member in MEMBERS {
        let path = folder.join(format!("{member}-{}", version(member)?));
        patches += &format!("{member} = {{ path = {:?} }}\n", path.display().to_string());
    }
    Ok(patches)
}

/// The files that cargo would pack, sorted. New files that were not added to git are included.
fn files() -> Result<Vec<String>> {
    let mut list = process::cargo();
    list.args(["package", "--package", NAME, "--list", "--allow-dirty", "--offline"]);
    let printed = process::read(list.current_dir(paths::root()))?;
    // Without a git repository, cargo leaves this file out.
    let files = printed.lines().filter(|file| *file != ".cargo_vcs_info.json");
    let mut files: Vec<_> = files.map(str::to_owned).collect();
    files.sort();
    Ok(files)
}

fn lines(files: &[String]) -> String {
    files.iter().map(|file| format!("{file}\n")).collect()
}

/// Whether a file is a test or an oracle.
fn is_of_tests(file: &str) -> bool {
    let mut parts = file.split('/');
    parts.any(|part| ["tests", "tests.rs", "oracle"].contains(&part)) || file.ends_with(".py")
}

/// The differences between the lists.
fn changes(listed: &str, found: &str) -> Vec<String> {
    let lacks = |list: &str, file: &str| !list.lines().any(|line| line == file);
    let new = found.lines().filter(|file| lacks(listed, file)).map(|file| format!("{file} is new"));
    let gone =
        listed.lines().filter(|file| lacks(found, file)).map(|file| format!("{file} is gone"));
    new.chain(gone).collect()
}

/// Unpacks the packages below `target`, as workspaces of their own, and returns the folder of the crate.
fn unpack(target: &Path) -> Result<PathBuf> {
    let folder = target.join("packed");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::create_dir_all(&folder)?;
    for package in MEMBERS.into_iter().chain([NAME]) {
        let name = format!("{package}-{}", version(package)?);
        let archive = target.join("package").join(format!("{name}.crate"));
        let mut tar = Command::new("tar");
        process::run(tar.arg("-xzf").arg(archive).arg("-C").arg(&folder))?;
        // The package is in the folder of another workspace, but is not part of it.
        append(&folder.join(name), "\n[workspace]\n")?;
    }
    let unpacked = folder.join(format!("{NAME}-{}", version(NAME)?));
    append(&unpacked, &patches(&unpacked)?)?;
    Ok(unpacked)
}

/// Adds a text to the manifest of an unpacked package.
fn append(unpacked: &Path, text: &str) -> Result<()> {
    let manifest = unpacked.join("Cargo.toml");
    let own = fs::read_to_string(&manifest).context("the package has no Cargo.toml")?;
    fs::write(manifest, own + text).context("Cargo.toml cannot be written")
}

fn version(package: &str) -> Result<String> {
    let manifest = manifest(package)?;
    Ok(manifest["version"].as_str().context("the package has no version")?.to_owned())
}

/// What Cargo.toml says of a package, as cargo reads it.
fn manifest(name: &str) -> Result<Value> {
    let mut metadata = process::cargo();
    metadata.args(["metadata", "--no-deps", "--offline", "--format-version", "1"]);
    let printed = process::read(metadata.current_dir(paths::root()))?;
    let metadata: Value =
        serde_json::from_str(&printed).context("cargo metadata prints no JSON")?;
    let mut packages = metadata["packages"].as_array().into_iter().flatten();
    let package = packages.find(|package| package["name"] == name);
    Ok(package.with_context(|| format!("the workspace has no {name}"))?.clone())
}

/// `cargo <command>` in `dir`, without libtorch.
fn doc_only(dir: &Path, command: &str, features: &str) -> Command {
    let mut cargo = without_libtorch(dir);
    cargo.args([command, "--locked", "--features", features]);
    cargo
}

/// `cargo` in `dir`, without libtorch. It has an output folder of its own, because the feature changes tch.
pub(crate) fn without_libtorch(dir: &Path) -> Command {
    let mut cargo = process::cargo();
    cargo.current_dir(dir);
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
    fn new_and_missing_files_are_named() {
        assert_eq!(changes("a\nb\n", "b\nc\n"), ["c is new", "a is gone"]);
        assert!(changes("a\n", "a\n").is_empty());
    }

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

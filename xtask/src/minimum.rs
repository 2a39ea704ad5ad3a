//! The oldest versions that Cargo.toml promises: of Rust, and of each dependency, in a lock that needs no nightly cargo.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::versions::{PAIRS, Pair, numbers};
use crate::{paths, process, workspace};

const REFRESH: &str = "run `cargo xtask lock` and commit it";

/// The path of the committed lock.
pub(crate) fn lock() -> PathBuf {
    paths::root().join("xtask/lock/minimal.lock")
}

/// A direct dependency of the crate, and the oldest version that is allowed.
#[derive(Debug, PartialEq, Eq)]
struct Minimum {
    name: String,
    version: String,
}

/// Copies the committed lock to an unpacked package, if it has the oldest version of each dependency.
pub(crate) fn apply(unpacked: &Path) -> Result<()> {
    let committed = lock();
    let text = fs::read_to_string(&committed)
        .with_context(|| format!("{} is missing: {REFRESH}", committed.display()))?;
    for Minimum { name, version } in minima(unpacked)? {
        ensure!(
            has(&text, &name, &version),
            "{} has not {name} {version}, the oldest that Cargo.toml allows: {REFRESH}",
            committed.display()
        );
    }
    fs::write(unpacked.join("Cargo.lock"), text).context("Cargo.lock cannot be written")
}

/// Rewrites the lock by means of an unpacked package, which is of no other use afterwards: its Cargo.toml then requires
/// exactly the oldest versions, which leaves cargo no choice.
pub(crate) fn rewrite(unpacked: &Path) -> Result<()> {
    let minima = minima(unpacked)?;
    for folder in folders(unpacked)? {
        let manifest = folder.join("Cargo.toml");
        let text = fs::read_to_string(&manifest).context("the package has no Cargo.toml")?;
        fs::write(&manifest, exact(&text, &minima))?;
    }
    fs::remove_file(unpacked.join("Cargo.lock")).context("the package has no Cargo.lock")?;
    process::run(process::cargo().arg("generate-lockfile").current_dir(unpacked))
        .context("raise in Cargo.toml what is too old for another dependency")?;
    fs::copy(unpacked.join("Cargo.lock"), lock()).context("the lock cannot be copied")?;
    println!("wrote {}", lock().display());
    Ok(())
}

/// The text of a packed Cargo.toml with exact versions. cargo writes a table for each dependency there.
fn exact(manifest: &str, minima: &[Minimum]) -> String {
    let mut dependency = None;
    let mut lines = String::new();
    for line in manifest.lines() {
        if let Some(table) = line.strip_prefix('[') {
            let name = table.trim_end_matches(']').rsplit_once("dependencies.");
            dependency = name.and_then(|(_, name)| minima.iter().find(|one| one.name == name));
        }
        match dependency.filter(|_| line.starts_with("version = ")) {
            Some(one) => lines += &format!("version = \"={}\"\n", one.version),
            None => lines += &format!("{line}\n"),
        }
    }
    lines
}

/// The folders of an unpacked package and of the members that were packed with it.
fn folders(unpacked: &Path) -> Result<Vec<PathBuf>> {
    let above = unpacked.parent().context("the package is in no folder")?;
    let folders = fs::read_dir(above)?.map(|entry| Ok(entry?.path()));
    folders.collect()
}

/// The oldest version of each direct dependency of an unpacked package and of the members that were packed with it. No
/// lock has what only the tests of those need.
fn minima(unpacked: &Path) -> Result<Vec<Minimum>> {
    let mut minima = Vec::new();
    for folder in folders(unpacked)? {
        let mut metadata = process::cargo();
        metadata.args(["metadata", "--no-deps", "--offline", "--format-version", "1"]);
        let printed = process::read(metadata.current_dir(&folder))?;
        let metadata = serde_json::from_str(&printed).context("cargo metadata prints no JSON")?;
        minima.extend(of_metadata(&metadata, folder == unpacked));
    }
    ensure!(!minima.is_empty(), "the package has no dependencies");
    Ok(minima)
}

fn of_metadata(metadata: &Value, with_tests: bool) -> Vec<Minimum> {
    let dependencies = metadata["packages"][0]["dependencies"].as_array().into_iter().flatten();
    let dependencies = dependencies.filter(|one| with_tests || one["kind"] != "dev");
    let minima = dependencies.filter_map(|dependency| {
        let (name, asked) = (dependency["name"].as_str()?, dependency["req"].as_str()?);
        Some(Minimum { name: name.to_owned(), version: oldest(asked) })
    });
    minima.collect()
}

/// The lower bound of a requirement: `1.5.0` for `^1.5` and for `>=1.5, <3`.
fn oldest(asked: &str) -> String {
    let first = asked.split(',').next().unwrap_or(asked);
    let version = first.trim_start_matches(['^', '>', '=', ' ']);
    let mut numbers: Vec<_> = version.split('.').collect();
    numbers.resize(3, "0");
    numbers.join(".")
}

/// The versions of a package in the text of a lock.
fn versions<'a>(lock: &'a str, name: &str) -> Vec<&'a str> {
    let name = format!("name = \"{name}\"");
    let lines = lock.lines().zip(lock.lines().skip(1));
    let versions = lines.filter(|(line, _)| *line == name).map(|(_, next)| next);
    versions.filter_map(|line| line.strip_prefix("version = \"")?.strip_suffix('"')).collect()
}

fn has(lock: &str, name: &str, version: &str) -> bool {
    versions(lock, name).contains(&version)
}

/// Checks every lock, and compiles with the promised version if rustup has it.
pub(crate) fn check_rust() -> Result<()> {
    let root = paths::root();
    let locked = Pair::locked(&root)?;
    let ours = check_dependencies(&root)?;
    for pair in PAIRS.into_iter().filter(|pair| *pair != locked) {
        check_dependencies(&workspace::make(&paths::target(), pair)?)?;
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
    check.args(["--features", "doc-only,full"]).current_dir(paths::root());
    // Without the path of the newer cargo that runs xtask, which cargo would otherwise inherit.
    check.env_remove("CARGO").env_remove("RUSTC").env("CARGO_TARGET_DIR", target());
    process::run(&mut check)
}

/// The folder of the outputs. If two compilers shared one, every run would build everything again.
fn target() -> PathBuf {
    paths::target().join("msrv")
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
    use serde_json::json;

    use super::*;

    #[test]
    fn the_oldest_version_is_the_lower_bound() {
        for (asked, version) in
            [("^1", "1.0.0"), ("^1.5", "1.5.0"), ("^1.0.60", "1.0.60"), (">=0.24, <0.27", "0.24.0")]
        {
            assert_eq!(oldest(asked), version, "{asked}");
        }
    }

    #[test]
    fn a_manifest_requires_exactly_the_oldest_versions() {
        let minima = [Minimum { name: "half".into(), version: "2.4.0".into() }];
        let text = "[package]\nversion = \"1\"\n[dependencies.half]\nversion = \"2.4\"\n";
        let wanted = "[package]\nversion = \"1\"\n[dependencies.half]\nversion = \"=2.4.0\"\n";
        assert_eq!(exact(text, &minima), wanted);
    }

    #[test]
    fn every_version_of_a_package_is_found() {
        let lock = "name = \"zip\"\nversion = \"0.6.6\"\n\nname = \"zip\"\nversion = \"9.4.1\"\n";
        assert_eq!(versions(lock, "zip"), ["0.6.6", "9.4.1"]);
        assert!(has(lock, "zip", "9.4.1") && !has(lock, "zip", "9.4.0"));
    }

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

//! The oldest dependencies that Cargo.toml allows: a lock with all of them, which is maintained without nightly cargo.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::{process, workspace};

const REFRESH: &str = "run `cargo xtask lock` and commit it";

/// The path of the committed lock.
pub(crate) fn lock() -> PathBuf {
    workspace::root().join("xtask/lock/minimal.lock")
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
    let manifest = unpacked.join("Cargo.toml");
    let text = fs::read_to_string(&manifest).context("the package has no Cargo.toml")?;
    fs::write(&manifest, exact(&text, &minima(unpacked)?))?;
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

/// The oldest version of each direct dependency of the package in `dir`.
fn minima(dir: &Path) -> Result<Vec<Minimum>> {
    let mut metadata = process::cargo();
    metadata.args(["metadata", "--no-deps", "--offline", "--format-version", "1"]);
    let printed = process::read(metadata.current_dir(dir))?;
    let metadata = serde_json::from_str(&printed).context("cargo metadata prints no JSON")?;
    let minima = of_metadata(&metadata);
    ensure!(!minima.is_empty(), "the package has no dependencies");
    Ok(minima)
}

fn of_metadata(metadata: &Value) -> Vec<Minimum> {
    let dependencies = metadata["packages"][0]["dependencies"].as_array().into_iter().flatten();
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

#[cfg(test)]
mod tests {
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
}

//! A second workspace with the same files and another Cargo.lock, so that another tch can be built without changing the
//! lock of the repository.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::args::Args;
use crate::versions::{PAIRS, Pair};
use crate::{process, workspace};

/// Creates or refreshes the shadow for `pair` below `target`, with its committed lock.
pub(crate) fn make(target: &Path, pair: Pair) -> Result<PathBuf> {
    let dir = mirror(target, pair)?;
    let committed = committed_lock(pair);
    let lock = fs::read_to_string(&committed).with_context(|| refresh(&committed, "is missing"))?;
    write_if_changed(&dir.join("Cargo.lock"), &lock)?;
    check_lock(&dir).with_context(|| refresh(&committed, "does not fit Cargo.toml any more"))?;
    Ok(dir)
}

/// `cargo xtask lock`: derives the lock of every other version from Cargo.lock.
pub(crate) fn rewrite_locks(args: Args) -> Result<()> {
    args.end()?;
    let root = workspace::root();
    let locked = Pair::locked(&root)?;
    for pair in PAIRS.into_iter().filter(|pair| *pair != locked) {
        let dir = mirror(&workspace::target(), pair)?;
        let lock = dir.join("Cargo.lock");
        fs::copy(root.join("Cargo.lock"), &lock).context("Cargo.lock cannot be copied")?;
        let version = format!("{}.0", pair.tch);
        // tch requires exactly its own torch-sys, which therefore changes with it.
        let mut update = process::cargo();
        update.args(["update", "--package", "tch", "--precise", &version]).current_dir(&dir);
        process::run(&mut update)?;
        let committed = committed_lock(pair);
        fs::copy(&lock, &committed)
            .with_context(|| format!("{} cannot be written", committed.display()))?;
        println!("wrote {}", committed.display());
    }
    Ok(())
}

/// The path of the lock of `pair` in the repository.
pub(crate) fn committed_lock(pair: Pair) -> PathBuf {
    workspace::root().join(format!("xtask/lock/tch-{}.lock", pair.tch))
}

fn refresh(lock: &Path, fault: &str) -> String {
    format!("{} {fault}: run `cargo xtask lock` and commit it", lock.display())
}

/// A folder with links to everything at the root of the repository except its lock and its outputs.
fn mirror(target: &Path, pair: Pair) -> Result<PathBuf> {
    let dir = target.join(format!("tch-{}", pair.tch));
    fs::create_dir_all(&dir).with_context(|| format!("{} cannot be made", dir.display()))?;
    let mut links = Vec::new();
    for entry in fs::read_dir(workspace::root())? {
        let entry = entry?;
        if ![".git", "target", "Cargo.lock"].iter().any(|own| entry.file_name() == *own) {
            link(&entry.path(), &dir.join(entry.file_name()))?;
            links.push(entry.file_name());
        }
    }
    for entry in fs::read_dir(&dir)? {
        let entry = entry?;
        if entry.path().is_symlink() && !links.contains(&entry.file_name()) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(dir)
}

/// Links to `original`, unless the link exists: a build may be reading through it.
fn link(original: &Path, link: &Path) -> Result<()> {
    if fs::read_link(link).is_ok_and(|target| target == original) {
        return Ok(());
    }
    if link.is_symlink() {
        fs::remove_file(link)?;
    }
    symlink(original, link).with_context(|| format!("{} cannot be linked", link.display()))
}

/// Fails if cargo would have to change the lock in `dir`.
fn check_lock(dir: &Path) -> Result<()> {
    let mut metadata = process::cargo();
    metadata.args(["metadata", "--locked", "--format-version", "1"]).current_dir(dir);
    process::read(&mut metadata).map(drop)
}

/// Writes the file only if its content changes, which preserves its time.
fn write_if_changed(path: &Path, text: &str) -> Result<()> {
    if fs::read_to_string(path).is_ok_and(|old| old == text) {
        return Ok(());
    }
    fs::write(path, text).with_context(|| format!("{} cannot be written", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::versions::locked;

    #[test]
    fn every_other_version_has_a_lock_with_that_version() {
        let default = Pair::locked(&workspace::root()).unwrap();
        for pair in PAIRS.into_iter().filter(|pair| *pair != default) {
            let lock = fs::read_to_string(committed_lock(pair)).unwrap();
            for package in ["tch", "torch-sys"] {
                let version = locked(&lock, package).unwrap();
                assert!(version.starts_with(pair.tch), "{package} {version}");
            }
        }
    }
}

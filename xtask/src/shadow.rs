//! A second workspace with the same files and another Cargo.lock, so that another tch can be built without changing the
//! lock of the repository; or with copies of the sources, in which faults can be planted.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::args::Args;
use crate::versions::{PAIRS, Pair};
use crate::{process, workspace};

/// Creates or refreshes the shadow for `pair` below `target`, with its committed lock.
pub(crate) fn make(target: &Path, pair: Pair) -> Result<PathBuf> {
    let dir = mirror_for(target, pair)?;
    let committed = committed_lock(pair);
    let lock = fs::read_to_string(&committed).with_context(|| refresh(&committed, "is missing"))?;
    write_if_changed(&dir.join("Cargo.lock"), &lock)?;
    check_lock(&dir).with_context(|| refresh(&committed, "does not fit Cargo.toml any more"))?;
    Ok(dir)
}

/// Creates or refreshes the shadow `name` below `target`, with the lock of the repository. The folders `copied` are
/// copies, whose files may be changed: the next call restores them.
pub(crate) fn make_with_copies(target: &Path, name: &str, copied: &[&str]) -> Result<PathBuf> {
    let (root, dir) = (workspace::root(), target.join(name));
    mirror(&dir, copied)?;
    copy_if_changed(&root.join("Cargo.lock"), &dir.join("Cargo.lock"))?;
    for folder in copied {
        copy_folder(&root.join(folder), &dir.join(folder))?;
    }
    Ok(dir)
}

/// `cargo xtask lock`: derives the lock of every other version from Cargo.lock.
pub(crate) fn rewrite_locks(args: Args) -> Result<()> {
    args.end()?;
    let root = workspace::root();
    let locked = Pair::locked(&root)?;
    for pair in PAIRS.into_iter().filter(|pair| *pair != locked) {
        let dir = mirror_for(&workspace::target(), pair)?;
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

/// The folder for `pair`, with links to everything except the lock.
fn mirror_for(target: &Path, pair: Pair) -> Result<PathBuf> {
    let dir = target.join(format!("tch-{}", pair.tch));
    mirror(&dir, &[])?;
    Ok(dir)
}

/// Makes a folder with links to everything at the root of the repository except its lock, its outputs and `own`.
fn mirror(dir: &Path, own: &[&str]) -> Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("{} cannot be made", dir.display()))?;
    let mut links = Vec::new();
    for entry in fs::read_dir(workspace::root())? {
        let entry = entry?;
        let mut left_out = [".git", "target", "Cargo.lock"].iter().chain(own);
        if !left_out.any(|name| entry.file_name() == *name) {
            link(&entry.path(), &dir.join(entry.file_name()))?;
            links.push(entry.file_name());
        }
    }
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.path().is_symlink() && !links.contains(&entry.file_name()) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Makes `copy` equal to the folder `original`. Files that are equal keep their times, so that cargo compiles only what
/// has changed.
fn copy_folder(original: &Path, copy: &Path) -> Result<()> {
    fs::create_dir_all(copy).with_context(|| format!("{} cannot be made", copy.display()))?;
    for entry in fs::read_dir(original)? {
        let (from, to) = {
            let entry = entry?;
            (entry.path(), copy.join(entry.file_name()))
        };
        if from.is_dir() { copy_folder(&from, &to)? } else { copy_if_changed(&from, &to)? }
    }
    for entry in fs::read_dir(copy)? {
        let entry = entry?;
        if !original.join(entry.file_name()).exists() {
            let gone = entry.path();
            if gone.is_dir() { fs::remove_dir_all(gone)? } else { fs::remove_file(gone)? }
        }
    }
    Ok(())
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

fn copy_if_changed(from: &Path, to: &Path) -> Result<()> {
    let text = fs::read_to_string(from).with_context(|| from.display().to_string())?;
    write_if_changed(to, &text)
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
    fn a_copy_is_restored_and_equal_files_keep_their_times() {
        let folder = workspace::target().join("tests-of-xtask/copies");
        let (original, copy) = (folder.join("original"), folder.join("copy"));
        fs::create_dir_all(original.join("inner")).unwrap();
        for file in ["same.rs", "inner/changed.rs"] {
            fs::write(original.join(file), file).unwrap();
        }
        copy_folder(&original, &copy).unwrap();
        let time = || fs::metadata(copy.join("same.rs")).unwrap().modified().unwrap();
        let before = time();
        fs::write(copy.join("inner/changed.rs"), "a fault").unwrap();
        fs::write(copy.join("inner/new.rs"), "a fault").unwrap();
        copy_folder(&original, &copy).unwrap();
        assert_eq!(fs::read_to_string(copy.join("inner/changed.rs")).unwrap(), "inner/changed.rs");
        assert!(!copy.join("inner/new.rs").exists());
        assert_eq!(time(), before);
    }

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

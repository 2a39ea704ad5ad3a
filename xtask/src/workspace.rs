//! A folder to build in: the repository, or its shadow with another tch, and the libtorch for it.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::args::Args;
use crate::libtorch::{self, Libtorch};
use crate::versions::Pair;
use crate::{compiler, paths, process};

/// Everything that a build needs.
#[derive(Debug)]
pub(crate) struct Workspace {
    pub(crate) dir: PathBuf,
    pub(crate) pair: Pair,
    pub(crate) libtorch: Libtorch,
    /// The output folder of a shadow.
    target: Option<PathBuf>,
}

impl Workspace {
    /// The workspace for `pair`, or for the versions in Cargo.lock, with everything that a build needs.
    pub(crate) fn new(pair: Option<Pair>) -> Result<Self> {
        let locked = Pair::locked()?;
        let pair = pair.unwrap_or(locked);
        compiler::version()?;
        let libtorch = libtorch::provide(pair, locked)?;
        if pair == locked {
            return Ok(Self { dir: paths::root(), pair, libtorch, target: None });
        }
        let dir = make(pair)?;
        // The outputs of packages that do not depend on tch are those of the root.
        Ok(Self { target: Some(paths::target()), dir, pair, libtorch })
    }

    /// Like [`Workspace::new`], and prints which libtorch it uses.
    pub(crate) fn announced(pair: Option<Pair>) -> Result<Self> {
        let workspace = Self::new(pair)?;
        let Libtorch { root, version, rule, .. } = &workspace.libtorch;
        println!("libtorch {version} in {} ({})", root.display(), rule.reason());
        Ok(workspace)
    }

    /// The same workspace in another folder, such as a shadow with planted faults.
    pub(crate) fn moved(self, dir: PathBuf) -> Self {
        Self { dir, target: Some(paths::target()), ..self }
    }

    /// `cargo` with this workspace's libtorch and Python, and with these words.
    pub(crate) fn cargo(&self, words: &str) -> Command {
        let mut cargo = process::cargo(&self.dir, &format!("--locked {words}"));
        self.apply(&mut cargo);
        cargo
    }

    /// `cargo test` with every feature, and with these words. Threads that have no work leave the cores to other tests:
    /// two programs run at the same time, each with several tests, and each of these with libtorch's threads.
    pub(crate) fn test(&self, words: &str) -> Command {
        let mut tests = self.cargo(&format!("test --features full {words}"));
        tests.env("OMP_WAIT_POLICY", "passive");
        tests
    }

    /// Any program with this workspace's libtorch and Python, in the current folder. In a shadow it runs in the
    /// shadow's folder, since the current folder builds with another tch.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        if self.target.is_some() {
            command.current_dir(&self.dir);
        }
        self.apply(&mut command);
        command
    }

    fn apply(&self, command: &mut Command) {
        if let Some(target) = &self.target {
            command.env("CARGO_TARGET_DIR", target);
        }
        self.libtorch.apply(command);
        // Lets tests and benches find Python's torch. If it exists, they fail without it.
        match &self.libtorch.python {
            Some(python) => {
                command.env("TCH_AMP_PYTHON", python).env("TCH_AMP_REQUIRE_PYTHON", "1");
            }
            None => {
                command.env_remove("TCH_AMP_PYTHON").env_remove("TCH_AMP_REQUIRE_PYTHON");
            }
        }
        if env::var_os("CI").is_some() {
            // Only in CI: elsewhere, an untested compiler may have warnings of its own.
            command.env("TCH_AMP_DENY_WARNINGS", "1");
        }
    }

    /// Prints a warning if there is no Python to compare with.
    pub(crate) fn warn_without_python(&self) {
        if self.libtorch.python.is_none() {
            eprintln!(
                "WARNING: the tests that compare with Python are SKIPPED: no Python here has torch \
                 {}. Set TCH_AMP_PYTHON to one that has, or unset LIBTORCH.",
                self.libtorch.version
            );
        }
    }
}

/// Creates or refreshes the shadow for `pair`, with its committed lock.
pub(crate) fn make(pair: Pair) -> Result<PathBuf> {
    let dir = mirror_for(pair)?;
    let committed = committed_lock(pair);
    let refresh =
        || format!("{} does not fit: run `cargo xtask lock` and commit it", committed.display());
    // Fails if cargo would have to change the lock.
    let checked =
        copy(&committed, &dir.join("Cargo.lock")).and_then(|()| metadata(&dir, "--locked"));
    checked.with_context(refresh)?;
    Ok(dir)
}

/// What `cargo metadata` says of the workspace in a folder.
pub(crate) fn metadata(dir: &Path, options: &str) -> Result<Value> {
    let mut metadata = process::cargo(dir, &format!("metadata --format-version 1 {options}"));
    serde_json::from_str(&process::read(&mut metadata)?).context("cargo metadata prints no JSON")
}

/// Creates or refreshes the shadow `name`, with the lock of the repository. The folders `copied` are copies, whose
/// files may be changed: the next call restores them.
pub(crate) fn make_with_copies(name: &str, copied: &[&str]) -> Result<PathBuf> {
    let (root, dir) = (paths::root(), paths::target().join(name));
    mirror(&dir, copied)?;
    for name in copied.iter().chain(&["Cargo.lock"]) {
        copy(&root.join(name), &dir.join(name))?;
    }
    Ok(dir)
}

/// `cargo xtask lock`: derives the lock of every other version from Cargo.lock.
pub(crate) fn rewrite_locks(args: Args) -> Result<()> {
    args.end()?;
    for pair in Pair::others()? {
        let (dir, committed) = (mirror_for(pair)?, committed_lock(pair));
        let lock = dir.join("Cargo.lock");
        copy(&paths::root().join("Cargo.lock"), &lock)?;
        // tch requires exactly its own torch-sys, which therefore changes with it.
        let update = format!("update --package tch --precise {}.0", pair.tch);
        process::run(&mut process::cargo(&dir, &update))?;
        copy(&lock, &committed)?;
        println!("wrote {}", committed.display());
    }
    Ok(())
}

/// The path of the lock of `pair` in the repository.
pub(crate) fn committed_lock(pair: Pair) -> PathBuf {
    paths::root().join(format!("xtask/lock/tch-{}.lock", pair.tch))
}

/// The folder for `pair`, with links to everything except the lock.
fn mirror_for(pair: Pair) -> Result<PathBuf> {
    let dir = paths::target().join(format!("tch-{}", pair.tch));
    mirror(&dir, &[])?;
    Ok(dir)
}

/// Makes a folder with links to everything at the root of the repository except its lock, its outputs and `own`.
fn mirror(dir: &Path, own: &[&str]) -> Result<()> {
    paths::make(dir.to_owned())?;
    let left_out = [&[".git", "target", "Cargo.lock"][..], own].concat();
    let mut originals = paths::entries(&paths::root())?;
    originals.retain(|path| !left_out.iter().any(|name| path.ends_with(name)));
    for original in &originals {
        link(original, &dir.join(original.file_name().unwrap_or_default()))?;
    }
    for path in paths::entries(dir)? {
        if path.is_symlink() && !originals.iter().any(|it| it.file_name() == path.file_name()) {
            fs::remove_file(path)?;
        }
    }
    Ok(())
}

/// Makes `to` equal to a file or a folder, except for compiled Python. Files that are equal keep their times, so that
/// cargo compiles only what has changed.
pub(crate) fn copy(from: &Path, to: &Path) -> Result<()> {
    let cannot = || format!("{} cannot be copied", from.display());
    if !from.is_dir() {
        let is_same = fs::read(to).is_ok_and(|old| fs::read(from).is_ok_and(|new| new == old));
        return if is_same { Ok(()) } else { fs::copy(from, to).map(drop).with_context(cannot) };
    }
    fs::create_dir_all(to).with_context(cannot)?;
    for path in paths::entries(from)? {
        let name = path.file_name().unwrap_or_default();
        if name != "__pycache__" {
            copy(&path, &to.join(name))?;
        }
    }
    for gone in paths::entries(to)? {
        if !from.join(gone.file_name().unwrap_or_default()).exists() {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::versions::locked;

    #[test]
    fn a_copy_is_restored_and_equal_files_keep_their_times() {
        let folder = paths::target().join("tests-of-xtask/copies");
        let (original, to) = (folder.join("original"), folder.join("copy"));
        fs::create_dir_all(original.join("inner/__pycache__")).unwrap();
        for file in ["same.rs", "inner/changed.rs", "inner/__pycache__/b.pyc"] {
            fs::write(original.join(file), file).unwrap();
        }
        copy(&original, &to).unwrap();
        let time = || fs::metadata(to.join("same.rs")).unwrap().modified().unwrap();
        let before = time();
        fs::write(to.join("inner/changed.rs"), "a fault").unwrap();
        fs::write(to.join("inner/new.rs"), "a fault").unwrap();
        copy(&original, &to).unwrap();
        assert_eq!(fs::read_to_string(to.join("inner/changed.rs")).unwrap(), "inner/changed.rs");
        assert!(!to.join("inner/new.rs").exists() && !to.join("inner/__pycache__").exists());
        assert_eq!(time(), before);
    }

    #[test]
    fn every_other_version_has_a_lock_with_that_version() {
        for pair in Pair::others().unwrap() {
            let lock = paths::read(&committed_lock(pair)).unwrap();
            for package in ["tch", "torch-sys"] {
                let version = locked(&lock, package).unwrap();
                assert!(version.starts_with(pair.tch), "{package} {version}");
            }
        }
    }
}

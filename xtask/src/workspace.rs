//! A folder to build in: the repository, or its shadow with another tch, and the libtorch for it.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::libtorch::{self, Libtorch};
use crate::versions::Pair;
use crate::{process, shadow, tools};

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
        let root = root();
        let locked = Pair::locked(&root)?;
        let pair = pair.unwrap_or(locked);
        tools::cxx()?;
        let libtorch = libtorch::provide(pair, locked)?;
        if pair == locked {
            return Ok(Self { dir: root, pair, libtorch, target: None });
        }
        let dir = shadow::make(&target(), pair)?;
        // The outputs of packages that do not depend on tch are those of the root.
        Ok(Self { target: Some(target()), dir, pair, libtorch })
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
        Self { dir, target: Some(target()), ..self }
    }

    /// `cargo <command>` with this workspace's libtorch and Python.
    pub(crate) fn cargo(&self, command: &str) -> Command {
        let mut cargo = process::cargo();
        cargo.arg(command).arg("--locked").current_dir(&self.dir);
        self.apply(&mut cargo);
        cargo
    }

    /// Like [`cargo`](Self::cargo), with every feature of the crate.
    pub(crate) fn cargo_full(&self, command: &str) -> Command {
        let mut cargo = self.cargo(command);
        cargo.args(["--features", "full"]);
        cargo
    }

    /// `cargo test` with every feature. Threads that have no work leave the cores to other tests: two programs run at
    /// the same time, each with several tests, and each of these with libtorch's threads.
    pub(crate) fn cargo_test(&self) -> Command {
        let mut tests = self.cargo_full("test");
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
        self.apply_python(command);
        if env::var_os("CI").is_some() {
            // Only in CI: elsewhere, an untested compiler may have warnings of its own.
            command.env("TCH_AMP_DENY_WARNINGS", "1");
        }
    }

    /// Lets tests and benches find Python's torch. If it exists, they fail without it.
    fn apply_python(&self, command: &mut Command) {
        match &self.libtorch.python {
            Some(python) => {
                command.env("TCH_AMP_PYTHON", python).env("TCH_AMP_REQUIRE_PYTHON", "1");
            }
            None => {
                command.env_remove("TCH_AMP_PYTHON").env_remove("TCH_AMP_REQUIRE_PYTHON");
            }
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

/// The root of the repository.
pub(crate) fn root() -> PathBuf {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().unwrap_or(xtask).to_owned()
}

/// The folder of cargo's outputs.
pub(crate) fn target() -> PathBuf {
    root().join(env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into()))
}

//! A libtorch, and where its parts are.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A libtorch of the right version.
#[derive(Clone, Debug)]
pub struct Libtorch {
    /// The folder with `lib/` and `include/`.
    pub root: PathBuf,
    /// Its version, with that of the build, such as `2.13.0+cu130`.
    pub version: String,
    /// How it was found.
    pub rule: Rule,
    /// A Python whose torch has the same version.
    pub python: Option<PathBuf>,
}

/// The rule by which a libtorch was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// `LIBTORCH` names it.
    Libtorch,
    /// It is that of the Python for which `LIBTORCH_USE_PYTORCH` is set.
    UsePytorch,
    /// `cargo xtask` has installed it.
    Cache,
}

impl Rule {
    /// The rule in words.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Libtorch => "LIBTORCH is set",
            Self::UsePytorch => "LIBTORCH_USE_PYTORCH is set",
            Self::Cache => "no LIBTORCH set for it: the cache folder of xtask",
        }
    }
}

impl Libtorch {
    /// The folder of the libraries.
    pub fn lib(&self) -> PathBuf {
        let moved = env::var_os("LIBTORCH_LIB").filter(|_| self.rule == Rule::Libtorch);
        moved.map_or_else(|| self.root.clone(), PathBuf::from).join("lib")
    }

    /// The folder of Python's packages, if this libtorch is that of one.
    pub fn site(&self) -> &Path {
        self.root.parent().unwrap_or(&self.root)
    }

    /// Whether this libtorch was built with CUDA.
    pub fn has_cuda(&self) -> bool {
        self.lib().join("libtorch_cuda.so").exists()
    }

    /// Makes builds that `command` starts use this libtorch and no other.
    pub fn apply(&self, command: &mut Command) {
        if self.rule == Rule::Cache {
            for name in ["LIBTORCH_USE_PYTORCH", "LIBTORCH_INCLUDE", "LIBTORCH_LIB"] {
                command.env_remove(name);
            }
            command.env("LIBTORCH", &self.root);
        }
    }
}

/// The version without the build after `+`: `2.13.0` for `2.13.0+cu130`.
pub fn without_build(version: &str) -> &str {
    version.split_once('+').map_or(version, |(release, _)| release)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_build_is_not_part_of_the_release() {
        assert_eq!(without_build("2.13.0+cu130"), "2.13.0");
        assert_eq!(without_build("2.13.0"), "2.13.0");
    }
}

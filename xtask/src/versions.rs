//! Which libtorch belongs to which tch, and which of them are locked.

use anyhow::{Context, Result, anyhow};

use crate::paths;

/// A supported version of tch and torch-sys, and the libtorch for which it is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pair {
    pub(crate) tch: &'static str,
    pub(crate) libtorch: &'static str,
}

/// Every supported pair, oldest first.
const PAIRS: [Pair; 2] =
    [Pair { tch: "0.24", libtorch: "2.11.0" }, Pair { tch: "0.26", libtorch: "2.13.0" }];

impl Pair {
    /// The pair of a tch version given as `0.24` or `0.24.0`.
    pub(crate) fn of_tch(version: &str) -> Result<Self> {
        let minor = minor(version);
        PAIRS.into_iter().find(|pair| pair.tch == minor).ok_or_else(|| {
            let supported = PAIRS.map(|pair| pair.tch).join(", ");
            anyhow!("tch {version} is not supported here; these are: {supported}")
        })
    }

    /// The pair in the repository's Cargo.lock.
    pub(crate) fn locked() -> Result<Self> {
        let lock = paths::read(&paths::root().join("Cargo.lock"))?;
        Self::of_tch(locked(&lock, "torch-sys").context("Cargo.lock has no torch-sys")?)
    }

    /// All other pairs.
    pub(crate) fn others() -> Result<impl Iterator<Item = Self>> {
        let locked = Self::locked()?;
        Ok(PAIRS.into_iter().filter(move |pair| *pair != locked))
    }
}

/// The version of `package` in the text of a Cargo.lock.
pub(crate) fn locked<'a>(lock: &'a str, package: &str) -> Option<&'a str> {
    let name = format!("name = \"{package}\"");
    let mut lines = lock.lines().skip_while(|line| *line != name);
    lines.nth(1)?.strip_prefix("version = \"")?.strip_suffix('"')
}

/// The minor version: `0.24` for `0.24.1`.
fn minor(version: &str) -> &str {
    version.match_indices('.').nth(1).map_or(version, |(end, _)| &version[..end])
}

/// The numbers of a version, for comparison. A missing number is 0.
pub(crate) fn numbers(version: &str) -> [u32; 3] {
    let mut parts = version.split('.').map(|part| part.parse().unwrap_or(0));
    [(); 3].map(|()| parts.next().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_locked_version_needs_the_whole_name() {
        let lock = r#"
[[package]]
name = "tch"
version = "0.24.0"
dependencies = [
 "torch-sys",
]

[[package]]
name = "torch-sys"
version = "0.24.1"
"#;
        let versions = ["tch", "torch-sys", "torch"].map(|name| locked(lock, name));
        assert_eq!(versions, [Some("0.24.0"), Some("0.24.1"), None]);
    }

    #[test]
    fn a_pair_is_found_by_the_minor_version() {
        for version in ["0.24", "0.24.0", "0.24.7"] {
            assert_eq!(Pair::of_tch(version).unwrap().libtorch, "2.11.0", "{version}");
        }
        for version in ["0.2", "0.245", "0", ""] {
            assert!(Pair::of_tch(version).is_err(), "{version}");
        }
    }

    #[test]
    fn the_repository_locks_a_supported_pair() {
        assert!(PAIRS.contains(&Pair::locked().unwrap()));
    }

    #[test]
    fn versions_compare_as_numbers() {
        assert!(numbers("1.88") == numbers("1.88.0"));
        assert!(numbers("1.9") < numbers("1.10"));
    }
}

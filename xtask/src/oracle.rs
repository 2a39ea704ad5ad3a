//! The Python whose torch is the reference of the tests.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::process;
use testbench::libtorch::without_build;

/// A Python with torch of `version`: the one that owns the libtorch in `root`, the user's choice, or the installed one.
pub(crate) fn find(root: &Path, version: &str) -> Option<PathBuf> {
    let named = env::var_os("TCH_AMP_PYTHON").map(PathBuf::from);
    let others = named.into_iter().chain([PathBuf::from("python3")]);
    let mut candidates = owners(root).into_iter().filter(|path| path.exists()).chain(others);
    candidates.find(|python| has_torch(python, version))
}

/// The possible paths of the Python if `root` is `<prefix>/lib/pythonX.Y/site-packages/torch`.
fn owners(root: &Path) -> Vec<PathBuf> {
    let mut above = root.ancestors().skip(1);
    let site = above.next().and_then(Path::file_name);
    let python = above.next().and_then(Path::file_name);
    let prefix = above.nth(1);
    match (site, python, prefix) {
        (Some(site), Some(python), Some(prefix)) if site == "site-packages" => {
            vec![prefix.join("bin").join(python), prefix.join("bin/python")]
        }
        _ => Vec::new(),
    }
}

fn has_torch(python: &Path, version: &str) -> bool {
    let code = "import torch; print(torch.__version__)";
    let printed = process::read(Command::new(python).args(["-c", code]));
    printed.is_ok_and(|found| without_build(&found) == version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_python_of_an_installed_torch_is_in_the_same_prefix() {
        let root = Path::new("/venv/lib/python3.11/site-packages/torch");
        assert_eq!(owners(root), ["/venv/bin/python3.11", "/venv/bin/python"].map(PathBuf::from));
    }

    #[test]
    fn a_libtorch_outside_of_python_has_no_owner() {
        for root in ["/opt/libtorch", "/", "torch", "/a/b/c/d/torch"] {
            assert!(owners(Path::new(root)).is_empty(), "{root}");
        }
    }
}

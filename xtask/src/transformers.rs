//! Hugging Face's transformers, with whose hooks a benchmark compares. It lies in a folder of its own, so that no
//! environment changes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::{cache, process};

const VERSION: &str = "5.23.0";

/// Imports what the benchmark uses.
const PRINT_VERSION: &str =
    "import transformers, transformers.debug_utils; print(transformers.__version__)";

/// The folder for PYTHONPATH that holds it, which is installed if need be. `None` if `python` has it anyway, or if it
/// cannot be installed, which is printed.
pub(crate) fn provide(python: &Path) -> Option<PathBuf> {
    if version(python, None).is_some() {
        return None;
    }
    match install(python) {
        Ok(dir) => Some(dir),
        Err(error) => {
            eprintln!("WARNING: transformers {VERSION} is left out of the comparison: {error:#}");
            None
        }
    }
}

fn install(python: &Path) -> Result<PathBuf> {
    let cache = cache::dir()?;
    fs::create_dir_all(&cache).context("the cache folder cannot be made; set XDG_CACHE_HOME")?;
    let dir = cache.join(format!("transformers-{VERSION}"));
    let _lock = cache::lock(&cache.join(format!("transformers-{VERSION}.lock")))?;
    if is_in(python, &dir) {
        return Ok(dir);
    }
    // What an interrupted run, or one with another Python, has left.
    if dir.exists() {
        fs::remove_dir_all(&dir).context("what an earlier run has left cannot be removed")?;
    }
    println!("getting transformers {VERSION} into {}", dir.display());
    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "install", "--no-cache-dir", "--only-binary", ":all:", "--no-input"])
        .args(["--disable-pip-version-check", "--quiet", "--target"])
        .arg(&dir)
        .arg(format!("transformers=={VERSION}"));
    process::run(&mut pip)?;
    ensure!(is_in(python, &dir), "it cannot be imported from {}", dir.display());
    Ok(dir)
}

fn is_in(python: &Path, dir: &Path) -> bool {
    version(python, Some(dir)).is_some_and(|version| version == VERSION)
}

/// The version that `python` imports, with `dir` in its path.
fn version(python: &Path, dir: Option<&Path>) -> Option<String> {
    let mut python = Command::new(python);
    python.args(["-c", PRINT_VERSION]).env_remove("LD_LIBRARY_PATH");
    if let Some(dir) = dir {
        python.env("PYTHONPATH", dir);
    }
    process::read(&mut python).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_complete_folder_of_the_version_is_taken() {
        let dir = std::env::temp_dir().join(format!("tch-amp-transformers-{}", std::process::id()));
        let package = dir.join("transformers");
        let is_taken = || is_in(Path::new("python3"), &dir);
        fs::create_dir_all(&package).unwrap();
        fs::write(package.join("__init__.py"), format!("__version__ = '{VERSION}'")).unwrap();
        assert!(!is_taken());
        fs::write(package.join("debug_utils.py"), "").unwrap();
        assert!(is_taken());
        fs::write(package.join("__init__.py"), "__version__ = '1.0'  # another").unwrap();
        assert!(!is_taken());
        fs::remove_dir_all(&dir).unwrap();
    }
}

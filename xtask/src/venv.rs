//! Python environments in the user's cache folder, created once and shared by all clones.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::{cache, process};
use testbench::libtorch::without_build;

/// An environment with one package of one version.
#[derive(Clone, Debug)]
pub(crate) struct Venv {
    pub(crate) dir: PathBuf,
    package: &'static str,
    version: String,
    /// The GB that creating it takes, including downloads.
    size: u64,
}

impl Venv {
    /// The environment with PyTorch, and therefore libtorch, of `version`.
    pub(crate) fn torch(version: &str) -> Result<Self> {
        Self::new("torch", version, 8)
    }

    /// The environment with clang-format of `version`.
    pub(crate) fn clang_format(version: &str) -> Result<Self> {
        Self::new("clang-format", version, 1)
    }

    /// The environment with Hugging Face's transformers of `version`, but without PyTorch.
    pub(crate) fn transformers(version: &str) -> Result<Self> {
        Self::new("transformers", version, 1)
    }

    fn new(package: &'static str, version: &str, size: u64) -> Result<Self> {
        let dir = cache::dir()?.join(format!("{package}-{version}"));
        Ok(Self { dir, package, version: version.to_owned(), size })
    }

    /// The path of a program in the environment.
    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.dir.join("bin").join(name)
    }

    /// The folder of the package itself.
    pub(crate) fn package_dir(&self) -> Result<PathBuf> {
        Ok(self.site()?.join(self.module()))
    }

    /// The folder of the package and of those that it needs.
    pub(crate) fn site(&self) -> Result<PathBuf> {
        let libs = self.dir.join("lib");
        let entries = fs::read_dir(&libs).with_context(|| format!("{} is gone", libs.display()))?;
        let sites = entries.flatten().map(|entry| entry.path().join("site-packages"));
        let mut sites = sites.filter(|site| site.join(self.module()).is_dir());
        sites.next().with_context(|| format!("{} has no {}", libs.display(), self.package))
    }

    /// Creates the environment unless it exists. Two concurrent runs create it once.
    pub(crate) fn ensure(&self) -> Result<()> {
        if self.is_ready() {
            return Ok(());
        }
        let cache = cache::dir()?;
        fs::create_dir_all(&cache)
            .with_context(|| format!("{} cannot be made; set XDG_CACHE_HOME", cache.display()))?;
        let _lock = cache::lock(&cache.join(format!("{}-{}.lock", self.package, self.version)))?;
        if self.is_ready() {
            return Ok(());
        }
        if !self.holds_package() {
            self.make()?;
        }
        fs::write(self.marker(), "").context("the cache folder cannot be written")
    }

    /// Whether the environment is complete. Its Python may have been removed since, by an upgrade.
    pub(crate) fn is_ready(&self) -> bool {
        self.marker().exists() && process::read(self.python().args(["-c", ""])).is_ok()
    }

    /// Whether the environment is complete, or, which takes longer to check, lacks only the marker.
    pub(crate) fn is_usable(&self) -> bool {
        self.is_ready() || self.holds_package()
    }

    /// Fails if the environment cannot be created, and states what to install.
    pub(crate) fn check_can_be_made(&self) -> Result<()> {
        self.check_python()?;
        let free = cache::free_gb(&self.dir)?;
        ensure!(
            free >= self.size,
            "{} {} needs {} GB in {}, where {free} are free: free some, or set XDG_CACHE_HOME to a \
             folder with more",
            self.package,
            self.version,
            self.size,
            self.dir.display()
        );
        Ok(())
    }

    fn check_python(&self) -> Result<()> {
        let purpose = format!("to get {} {} from PyPI", self.package, self.version);
        let Ok(version) = process::read(python3().args(["-c", PRINT_VERSION])) else {
            bail!(
                "python3 is needed {purpose} and does not run here: install it, such as with \
                 `apt install python3 python3-venv`"
            );
        };
        if process::read(python3().args(["-c", "import venv, ensurepip"])).is_err() {
            bail!(
                "python3 ({version}) lacks the modules venv and ensurepip, needed {purpose}: \
                 install them, such as with `apt install python3-venv`"
            );
        }
        Ok(())
    }

    fn make(&self) -> Result<()> {
        self.check_python()?;
        if self.dir.exists() {
            fs::remove_dir_all(&self.dir)
                .with_context(|| format!("{} cannot be removed", self.dir.display()))?;
        }
        self.check_can_be_made()?;
        println!("getting {} {} into {}", self.package, self.version, self.dir.display());
        process::run(python3().args(["-m", "venv"]).arg(&self.dir))?;
        self.install()
    }

    fn install(&self) -> Result<()> {
        // Beside the environment, because /tmp is often in memory and too small for the wheels.
        let downloads = self.dir.join("downloads");
        fs::create_dir(&downloads).context("the cache folder cannot be written")?;
        let requirement = format!("{}=={}", self.package, self.version);
        let mut pip = self.python();
        pip.args(["-m", "pip", "install", "--no-cache-dir", "--only-binary", ":all:"])
            .args(["--no-input", "--disable-pip-version-check", &requirement])
            .env("TMPDIR", &downloads);
        if process::run(&mut pip).is_err() {
            bail!(
                "pip could not install {requirement}, for the reason that it gives above. Without \
                 a network, or behind a proxy, set HTTPS_PROXY or PIP_INDEX_URL; if there is no \
                 wheel for this Python, put another python3 first in PATH. Then run this again"
            );
        }
        fs::remove_dir_all(&downloads).context("the downloads cannot be removed")
    }

    /// Whether the package can be imported and has the version.
    fn holds_package(&self) -> bool {
        let code = format!(
            "import {0}, importlib.metadata as m; print(m.version('{1}'))",
            self.module(),
            self.package
        );
        let version = process::read(self.python().args(["-c", &code]));
        version.is_ok_and(|version| without_build(&version) == self.version)
    }

    fn python(&self) -> Command {
        Command::new(self.program("python"))
    }

    fn module(&self) -> String {
        self.package.replace('-', "_")
    }

    fn marker(&self) -> PathBuf {
        self.dir.join("ready")
    }
}

const PRINT_VERSION: &str = "import platform; print(platform.python_version())";

fn python3() -> Command {
    Command::new("python3")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_environment_without_its_marker_is_not_ready() {
        let dir = std::env::temp_dir().join("no-such-environment");
        let venv = Venv { dir, package: "torch", version: "2.13.0".into(), size: 1 };
        assert!(!venv.is_usable());
    }
}

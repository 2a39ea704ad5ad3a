//! Python environments in the user's cache folder, created once and shared by all clones.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::{cache, paths, process};
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

    /// The environment with a package, which takes so many GB.
    pub(crate) fn new(package: &'static str, version: &str, size: u64) -> Result<Self> {
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
        let sites = paths::entries(&libs)?.into_iter().map(|python| python.join("site-packages"));
        let mut sites = sites.filter(|site| site.join(self.module()).is_dir());
        sites.next().with_context(|| format!("{} has no {}", libs.display(), self.package))
    }

    /// Creates the environment unless it exists. Two concurrent runs create it once.
    pub(crate) fn ensure(&self) -> Result<&Self> {
        if self.is_ready() {
            return Ok(self);
        }
        let cache = paths::make(cache::dir()?).context("set XDG_CACHE_HOME to another folder")?;
        let _lock = cache::lock(&cache.join(format!("{}-{}.lock", self.package, self.version)))?;
        if !self.is_ready() {
            if !self.holds_package() {
                self.make()?;
            }
            paths::write(&self.marker(), "")?;
        }
        Ok(self)
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
        let Self { dir, package, version, size } = self;
        let free = cache::free_gb(dir)?;
        ensure!(
            free >= *size,
            "{package} {version} needs {size} GB in {}, where {free} are free: free some, or set XDG_CACHE_HOME to a \
             folder with more",
            dir.display()
        );
        Ok(())
    }

    fn check_python(&self) -> Result<()> {
        let purpose = format!("to get {} {} from PyPI", self.package, self.version);
        let Some(version) = process::first_line(python3().arg("--version")) else {
            bail!(
                "python3 is needed {purpose} and does not run here: install it, such as with \
                 `apt install python3 python3-venv`"
            );
        };
        if process::read(python3().args(["-c", "import venv, ensurepip"])).is_err() {
            bail!(
                "{version} lacks the modules venv and ensurepip, needed {purpose}: \
                 install them, such as with `apt install python3-venv`"
            );
        }
        Ok(())
    }

    fn make(&self) -> Result<()> {
        self.check_python()?;
        paths::make_empty(self.dir.clone())?;
        self.check_can_be_made()?;
        println!("getting {} {} into {}", self.package, self.version, self.dir.display());
        process::run(python3().args(["-m", "venv"]).arg(&self.dir))?;
        // Beside the environment, because /tmp is often in memory and too small for the wheels.
        let downloads = paths::make(self.dir.join("downloads"))?;
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
        let (module, package) = (self.module(), self.package);
        let code =
            format!("import {module}, importlib.metadata as m; print(m.version('{package}'))");
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

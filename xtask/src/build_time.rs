//! `cargo xtask build-time`: how long a program that has tch waits when it adds this crate.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result};

use crate::args::Args;
use crate::workspace::Workspace;
use crate::{paths, process};

const MAIN: &str = "fn main() { println!(\"{}\", tch::Cuda::is_available()) }\n";

/// `cargo xtask build-time`.
pub(crate) fn run(mut args: Args) -> Result<()> {
    let pair = args.tch()?;
    args.end()?;
    let workspace = Workspace::announced(pair)?;
    let program = Program::new(&workspace)?;
    let tch = program.build(None)?;
    println!("{:<28} {tch:>6.1} s", "tch alone");
    for features in ["", "insight", "distributed", "jit", "full"] {
        let seconds = program.build(Some(features))?;
        let name = if features.is_empty() { "no feature" } else { features };
        let mib = program.rlib()?.div_ceil(1 << 20);
        println!("{:<28} {seconds:>6.1} s  {mib:>4} MiB of rlib", format!("tch-amp, {name}"));
    }
    Ok(())
}

/// A program that depends on tch, and then on this crate as well.
struct Program<'a> {
    workspace: &'a Workspace,
    folder: PathBuf,
}

impl<'a> Program<'a> {
    fn new(workspace: &'a Workspace) -> Result<Self> {
        let folder = paths::target().join("build-time").join(workspace.pair.tch);
        if folder.exists() {
            fs::remove_dir_all(&folder)
                .with_context(|| format!("{} cannot be removed", folder.display()))?;
        }
        fs::create_dir_all(folder.join("src"))?;
        fs::write(folder.join("src/main.rs"), MAIN)?;
        Ok(Self { workspace, folder })
    }

    /// Builds with tch alone, or adds the crate with these features to that build. Returns the seconds.
    fn build(&self, features: Option<&str>) -> Result<f64> {
        let mut manifest = format!(
            "[package]\nname = \"build-time\"\nedition = \"2024\"\n\n[workspace]\n\n[dependencies]\n\
             tch = {{ version = \"{}\", default-features = false }}\n",
            self.workspace.pair.tch
        );
        let target = self.target(features.is_some());
        if let Some(features) = features {
            let path = self.workspace.dir.canonicalize()?;
            let list = if features.is_empty() { String::new() } else { format!("{features:?}") };
            manifest += &format!("tch-amp = {{ path = {path:?}, features = [{list}] }}\n");
            if target.exists() {
                fs::remove_dir_all(&target)?;
            }
            process::run(Command::new("cp").arg("-a").arg(self.target(false)).arg(&target))?;
        }
        fs::write(self.folder.join("Cargo.toml"), manifest)?;
        fs::copy(self.workspace.dir.join("Cargo.lock"), self.folder.join("Cargo.lock"))?;
        let mut cargo = process::cargo();
        cargo.args(["build", "--quiet", "--target-dir"]).arg(&target).current_dir(&self.folder);
        self.workspace.libtorch.apply(&mut cargo);
        let start = Instant::now();
        process::run(&mut cargo)?;
        Ok(start.elapsed().as_secs_f64())
    }

    fn target(&self, with_crate: bool) -> PathBuf {
        self.folder.join(if with_crate { "with" } else { "without" })
    }

    /// The size of the compiled crate in bytes.
    fn rlib(&self) -> Result<u64> {
        largest(&self.target(true).join("debug/deps"), "libtch_amp-")
    }
}

/// The size of the largest rlib in a folder whose name begins like this.
fn largest(folder: &Path, name: &str) -> Result<u64> {
    let mut largest = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let file = entry.file_name().to_string_lossy().into_owned();
        if file.starts_with(name) && file.ends_with(".rlib") {
            largest = largest.max(entry.metadata()?.len());
        }
    }
    Ok(largest)
}

//! `cargo xtask build-time`: how long a program that has tch waits when it adds this crate.

use std::fmt;
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
    println!("{:<28} {tch}", "tch alone");
    for features in ["", "insight", "distributed", "jit", "full"] {
        let seconds = program.build(Some(features))?;
        let name = if features.is_empty() { "no feature" } else { features };
        let mib = program.rlib()?.div_ceil(1 << 20);
        println!("{:<28} {seconds}  {mib:>4} MiB of rlib", format!("tch-amp, {name}"));
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
        let folder =
            paths::make_empty(paths::target().join("build-time").join(workspace.pair.tch))?;
        paths::write(&paths::make(folder.join("src"))?.join("main.rs"), MAIN)?;
        Ok(Self { workspace, folder })
    }

    /// Builds with tch alone from nothing, or adds the crate with these features to that build.
    fn build(&self, features: Option<&str>) -> Result<Seconds> {
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
            paths::make_empty(target.clone())?;
            process::run(Command::new("cp").arg("-aT").arg(self.target(false)).arg(&target))?;
        }
        paths::write(&self.folder.join("Cargo.toml"), &manifest)?;
        fs::copy(self.workspace.dir.join("Cargo.lock"), self.folder.join("Cargo.lock"))?;
        let mut cargo = process::cargo(&self.folder, "build --quiet --target-dir");
        cargo.arg(&target);
        self.workspace.libtorch.apply(&mut cargo);
        let (start, of_cores) = (Instant::now(), of_children()?);
        process::run(&mut cargo)?;
        Ok(Seconds { waited: start.elapsed().as_secs_f64(), of_cores: of_children()? - of_cores })
    }

    fn target(&self, with_crate: bool) -> PathBuf {
        self.folder.join(if with_crate { "with" } else { "without" })
    }

    /// The size of the compiled crate in bytes.
    fn rlib(&self) -> Result<u64> {
        let mut files = paths::entries(&self.target(true).join("debug/deps"))?;
        let is_rlib = |file: &str| file.starts_with("libtch_amp-") && file.ends_with(".rlib");
        files.retain(|path| is_rlib(&paths::name(path)));
        let sizes = files.iter().map(|file| Ok(file.metadata()?.len()));
        Ok(sizes.collect::<Result<Vec<_>>>()?.into_iter().max().unwrap_or_default())
    }
}

/// How long a build took, and how long all cores together worked on it, which other work on the machine changes less.
struct Seconds {
    waited: f64,
    of_cores: f64,
}

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>6.1} s, {:>6.1} s of cores", self.waited, self.of_cores)
    }
}

/// The seconds of cores that all processes have used which this one has started and which have ended.
fn of_children() -> Result<f64> {
    let stat = paths::read(Path::new("/proc/self/stat"))?;
    seconds_of_children(&stat).with_context(|| format!("/proc/self/stat is unknown: {stat}"))
}

/// The fields `cutime` and `cstime` of Linux, hundredths of a second. The name before them may contain anything.
fn seconds_of_children(stat: &str) -> Option<f64> {
    let (_, after_name) = stat.rsplit_once(')')?;
    let mut fields = after_name.split_whitespace().skip(13).map(|field| field.parse::<f64>().ok());
    Some((fields.next()?? + fields.next()??) / 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_of_ended_children_are_the_fields_16_and_17() {
        let stat = "7 (a) name) S 1 7 7 0 -1 4 5 6 7 8 900 901 1200 345 20 0 1 0 33";
        assert_eq!(seconds_of_children(stat), Some(15.45));
        assert_eq!(seconds_of_children("7 (name) S 1 7"), None);
    }
}

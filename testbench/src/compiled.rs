//! Compiles the C++ that takes the place of libraries, and keeps what has not changed.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::{env, thread};

use anyhow::{Context, Result};

use crate::libtorch::Libtorch;
use crate::{cache, compiler, paths, process};

/// The options that determine how all sources compile, besides the headers of libtorch.
const FLAGS: [&str; 8] =
    ["-std=c++20", "-O1", "-g1", "-fPIC", "-Wall", "-Wextra", "-D_GLIBCXX_USE_CXX11_ABI=1", "-c"];

/// What is compiled with the same options and the same headers.
#[derive(Debug)]
pub struct Unit<'a> {
    /// Whose headers the sources include.
    pub libtorch: &'a Libtorch,
    /// Where the objects are kept.
    pub folder: &'a Path,
    /// Further options.
    pub flags: &'a [&'a str],
    /// Folders of headers that are not our own.
    pub system: Vec<PathBuf>,
    /// Folders of headers that are.
    pub own: Vec<PathBuf>,
    /// The files on which each object depends besides its source.
    pub headers: Vec<PathBuf>,
}

impl Unit<'_> {
    /// Compiles the sources that have changed, as many at once as there are cores, and returns all objects.
    pub fn compile(&self, sources: &[PathBuf]) -> Result<Vec<PathBuf>> {
        let mut objects = Vec::new();
        let mut compilers = Vec::new();
        for source in sources {
            let object = self.object(source)?;
            if !object.is_file() {
                compilers.push(self.compiler(source, &object));
            }
            objects.push(object);
        }
        run_together(compilers)?;
        Ok(objects)
    }

    fn compiler(&self, source: &Path, object: &Path) -> Command {
        let mut compiler = compiler::command();
        compiler.args(FLAGS).args(self.flags);
        if env::var_os("CI").is_some() {
            compiler.arg("-Werror");
        }
        // As system headers, whose warnings are suppressed.
        let of_libtorch = ["include", "include/torch/csrc/api/include"];
        let of_libtorch = of_libtorch.map(|name| self.libtorch.root.join(name));
        for include in of_libtorch.iter().chain(&self.system) {
            compiler.arg("-isystem").arg(include);
        }
        for include in &self.own {
            compiler.arg("-I").arg(include);
        }
        compiler.arg(source).arg("-o").arg(object);
        compiler
    }

    /// The command that links objects to a shared library in the folder.
    pub fn linker(&self, soname: &str, objects: &[PathBuf]) -> Command {
        let mut linker = compiler::command();
        linker.args(["-shared", "-o"]).arg(self.folder.join(soname)).args(objects);
        linker.arg(format!("-Wl,-soname,{soname}"));
        linker
    }

    /// The path of a source's object, with a name that changes with everything that it depends on.
    fn object(&self, source: &Path) -> Result<PathBuf> {
        let mut parts = self.headers.clone();
        parts.push(source.to_owned());
        let stem = source.file_stem().unwrap_or_default().to_string_lossy();
        Ok(self.folder.join(format!("{stem}-{}.o", stamp(&parts, self.libtorch, self.flags)?)))
    }
}

/// Makes the folder `name` of the build's outputs for one libtorch, runs `build` in it unless the `files` and all else
/// that it depends on are as they were, and returns its path.
pub fn provide(
    name: &str,
    libtorch: &Libtorch,
    files: &[PathBuf],
    build: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let version = &libtorch.version;
    let folder = paths::make(paths::target().join(name).join(version))?;
    let _lock: File = cache::lock(&folder.join("lock"))?;
    let (path, stamp) = (folder.join("stamp"), stamp(files, libtorch, &[])?);
    if !fs::read_to_string(&path).is_ok_and(|known| known == stamp) {
        println!("building testbench/{name} for libtorch {version}");
        build(&folder).with_context(|| format!("testbench/{name} cannot be built"))?;
        fs::write(path, stamp)?;
    }
    Ok(folder)
}

/// Adds a folder of libraries to those that are searched before the others.
pub fn search_first(folder: &Path, command: &mut Command) {
    let mut folders = vec![folder.to_owned()];
    folders.extend(env::split_paths(&env::var_os("LD_LIBRARY_PATH").unwrap_or_default()));
    // A path that contains a colon cannot be in the list. A build folder never contains one, or cargo would not run.
    let joined = env::join_paths(folders).unwrap_or_else(|_| folder.into());
    command.env("LD_LIBRARY_PATH", joined);
}

/// Runs a script of `folder`, a path in the repository, with Python's own library.
pub fn python(libtorch: &Libtorch, folder: &str, script: &str) -> Command {
    let python = libtorch.python.clone().unwrap_or_else(|| "python3".into());
    let mut command = Command::new(python);
    command.arg("-B").arg(paths::root().join(folder).join(script));
    command
}

/// A hash of the files, the compiler with its options, and the libtorch.
fn stamp(files: &[PathBuf], libtorch: &Libtorch, flags: &[&str]) -> Result<String> {
    let mut hasher = DefaultHasher::new();
    for file in files {
        let text = fs::read(file).with_context(|| format!("{} cannot be read", file.display()))?;
        (file.file_name(), text).hash(&mut hasher);
    }
    (compiler::version()?, FLAGS, flags, &libtorch.root, &libtorch.version).hash(&mut hasher);
    Ok(format!("{:016x}", hasher.finish()))
}

/// Runs the commands in parallel, as many at once as there are cores.
pub fn run_together(commands: Vec<Command>) -> Result<()> {
    let at_once = thread::available_parallelism().map_or(1, usize::from);
    let mut running: VecDeque<(Command, Child)> = VecDeque::new();
    let mut waiting = VecDeque::from(commands);
    while !(waiting.is_empty() && running.is_empty()) {
        while running.len() < at_once
            && let Some(mut command) = waiting.pop_front()
        {
            let child = process::start(&mut command)?;
            running.push_back((command, child));
        }
        if let Some((command, mut child)) = running.pop_front() {
            process::check(&command, child.wait()?)?;
        }
    }
    Ok(())
}

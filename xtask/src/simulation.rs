//! The simulated GPUs: builds `tests/simulated_cuda/` as a library that replaces libtorch_cuda.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::{env, fs, thread};

use anyhow::{Context, Result, ensure};

use crate::libtorch::Libtorch;
use crate::workspace::{self, Workspace};
use crate::{cache, process, tools};

/// The path of the sources, relative to the root of the repository.
pub(crate) const SOURCES: &str = "tests/simulated_cuda";

const LIBRARY: &str = "libtorch_cuda.so";

/// The options that determine how the sources compile, besides the headers of libtorch.
const FLAGS: [&str; 8] =
    ["-std=c++20", "-O1", "-g1", "-fPIC", "-Wall", "-Wextra", "-D_GLIBCXX_USE_CXX11_ABI=1", "-c"];

/// The built library.
#[derive(Debug)]
pub(crate) struct Simulation {
    folder: PathBuf,
}

impl Simulation {
    /// Builds the library for the libtorch of a workspace, unless that was done before.
    pub(crate) fn provide(workspace: &Workspace) -> Result<Self> {
        let libtorch = &workspace.libtorch;
        check_possible(libtorch)?;
        let folder = workspace::target().join("simulated_cuda").join(&libtorch.version);
        fs::create_dir_all(&folder)
            .with_context(|| format!("{} cannot be made", folder.display()))?;
        let _lock = cache::lock(&folder.join("lock"))?;
        let simulation = Self { folder };
        let stamp = stamp(&sources("")?, libtorch)?;
        if fs::read_to_string(simulation.folder.join("stamp")).is_ok_and(|known| known == stamp) {
            return Ok(simulation);
        }
        println!("building the simulated GPUs for libtorch {}", libtorch.version);
        simulation.build(libtorch).with_context(|| format!("{SOURCES} cannot be built"))?;
        fs::write(simulation.folder.join("stamp"), stamp)?;
        Ok(simulation)
    }

    /// Makes `command` and the processes that it starts use the simulated GPUs instead of real ones.
    pub(crate) fn apply(&self, command: &mut Command) {
        let mut folders = vec![self.folder.clone()];
        folders.extend(env::split_paths(&env::var_os("LD_LIBRARY_PATH").unwrap_or_default()));
        // A path that contains a colon cannot be in the list. A build folder never contains one, or cargo would not
        // run.
        let joined = env::join_paths(folders).unwrap_or_else(|_| self.folder.clone().into());
        command.env("LD_LIBRARY_PATH", joined);
    }

    /// Compiles the sources that have changed, and links.
    fn build(&self, libtorch: &Libtorch) -> Result<()> {
        self.list_operators(libtorch)?;
        let mut objects = Vec::new();
        let mut compilers = Vec::new();
        for source in sources(".cpp")? {
            let object = self.object(&source, libtorch)?;
            if !object.is_file() {
                compilers.push(self.compiler(&source, &object, libtorch));
            }
            objects.push(object);
        }
        run_together(compilers)?;
        let mut linker = cxx();
        linker.args(["-shared", "-o"]).arg(self.folder.join(LIBRARY)).args(&objects);
        linker.arg(format!("-Wl,-soname,{LIBRARY}"));
        linker.arg("-L").arg(libtorch.lib()).args(["-ltorch_cpu", "-lc10"]);
        process::run(&mut linker)
    }

    fn compiler(&self, source: &Path, object: &Path, libtorch: &Libtorch) -> Command {
        let mut compiler = cxx();
        compiler.args(FLAGS);
        if env::var_os("CI").is_some() {
            compiler.arg("-Werror");
        }
        // As system headers, whose warnings are suppressed.
        for include in ["include", "include/torch/csrc/api/include"] {
            compiler.arg("-isystem").arg(libtorch.root.join(include));
        }
        compiler.arg("-isystem").arg(workspace::root().join("csrc/distributed/gloo_headers"));
        compiler.arg("-I").arg(&self.folder).arg(source).arg("-o").arg(object);
        compiler
    }

    /// Writes the list of CUDA's operators that `operators.cpp` includes.
    fn list_operators(&self, libtorch: &Libtorch) -> Result<()> {
        let python = libtorch.python.clone().unwrap_or_else(|| "python3".into());
        let mut script = Command::new(python);
        script.arg("-B").arg(workspace::root().join(SOURCES).join("operators.py"));
        process::run(script.arg(functions_of(libtorch)).arg(self.folder.join("operators.inc")))
    }

    /// The path of a source's object, with a name that changes with everything that it depends on.
    fn object(&self, source: &Path, libtorch: &Libtorch) -> Result<PathBuf> {
        let mut parts = sources(".h")?;
        parts.push(self.folder.join("operators.inc"));
        parts.push(source.to_owned());
        let stem = source.file_stem().unwrap_or_default().to_string_lossy();
        Ok(self.folder.join(format!("{stem}-{}.o", stamp(&parts, libtorch)?)))
    }
}

/// The list of PyTorch's operators, which the wheel contains beside torch.
fn functions_of(libtorch: &Libtorch) -> PathBuf {
    let site = libtorch.root.parent().unwrap_or(&libtorch.root);
    site.join("torchgen/packaged/ATen/native/native_functions.yaml")
}

/// Fails with the reason if GPUs cannot be simulated.
pub(crate) fn check_possible(libtorch: &Libtorch) -> Result<()> {
    ensure!(cfg!(target_os = "linux"), "GPUs are simulated on Linux only");
    ensure!(
        libtorch.has_cuda(),
        "the libtorch in {} is one without CUDA, and what is linked with it asks for no GPU: set LIBTORCH to a CUDA \
         build, or unset it to have one downloaded",
        libtorch.root.display()
    );
    let functions = functions_of(libtorch);
    ensure!(
        functions.is_file(),
        "there is no {}: the simulated GPUs need the libtorch of a PyTorch wheel; unset LIBTORCH to have one downloaded",
        functions.display()
    );
    Ok(())
}

/// A hash of the files, the compiler and the libtorch.
fn stamp(files: &[PathBuf], libtorch: &Libtorch) -> Result<String> {
    let mut hasher = DefaultHasher::new();
    for file in files {
        let text = fs::read(file).with_context(|| format!("{} cannot be read", file.display()))?;
        (file.file_name(), text).hash(&mut hasher);
    }
    (tools::cxx()?, FLAGS, &libtorch.root, &libtorch.version).hash(&mut hasher);
    Ok(format!("{:016x}", hasher.finish()))
}

/// The files of the simulation whose names end with `end`, sorted.
fn sources(end: &str) -> Result<Vec<PathBuf>> {
    let folder = workspace::root().join(SOURCES);
    let entries =
        fs::read_dir(&folder).with_context(|| format!("{} cannot be read", folder.display()))?;
    let mut files = Vec::new();
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_file() && entry.file_name().to_string_lossy().ends_with(end) {
            files.push(entry.path());
        }
    }
    files.sort();
    Ok(files)
}

/// The C++ compiler, with the options that CXX may contain.
pub(crate) fn cxx() -> Command {
    let words = env::var("CXX").unwrap_or_else(|_| "c++".into());
    let mut words = words.split_whitespace().map(OsString::from);
    let mut command = Command::new(words.next().unwrap_or_else(|| "c++".into()));
    command.args(words);
    command
}

/// Runs the commands in parallel, as many at once as there are cores.
fn run_together(commands: Vec<Command>) -> Result<()> {
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

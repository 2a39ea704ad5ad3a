//! The simulated GPUs: builds `testbench/simulated_cuda/` as a library that replaces libtorch_cuda.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};

use crate::compiled::{self, Unit};
use crate::libtorch::Libtorch;
use crate::paths::files;
use crate::{paths, process};

/// The path of the sources, relative to the root of the repository.
pub const SOURCES: &str = "testbench/simulated_cuda";

const LIBRARY: &str = "libtorch_cuda.so";

/// The built library.
#[derive(Debug)]
pub struct Simulation {
    folder: PathBuf,
}

impl Simulation {
    /// Builds the library for this libtorch, unless that was done before.
    pub fn provide(libtorch: &Libtorch) -> Result<Self> {
        check_possible(libtorch)?;
        let build = |folder: &Path| build(libtorch, folder);
        let folder = compiled::provide("simulated_cuda", libtorch, &files(SOURCES, "")?, build)?;
        Ok(Self { folder })
    }

    /// Makes `command` and the processes that it starts use the simulated GPUs instead of real ones.
    pub fn apply(&self, command: &mut Command) {
        compiled::search_first(&self.folder, command);
    }
}

/// Compiles the sources that have changed, and links.
fn build(libtorch: &Libtorch, folder: &Path) -> Result<()> {
    let operators = folder.join("operators.inc");
    // The list of CUDA's operators, which `operators.cpp` includes.
    let mut script = compiled::python(libtorch, SOURCES, "operators.py");
    process::run(script.arg(functions_of(libtorch)).arg(&operators))?;
    let mut headers = files(SOURCES, ".h")?;
    headers.push(operators);
    let unit = Unit {
        libtorch,
        folder,
        flags: &[],
        system: vec![paths::root().join("csrc/distributed/gloo_headers")],
        own: vec![folder.to_owned()],
        headers,
    };
    let objects = unit.compile(&files(SOURCES, ".cpp")?)?;
    let mut linker = unit.linker(LIBRARY, &objects);
    process::run(linker.arg("-L").arg(libtorch.lib()).args(["-ltorch_cpu", "-lc10"]))
}

/// The list of PyTorch's operators, which the wheel contains beside torch.
fn functions_of(libtorch: &Libtorch) -> PathBuf {
    libtorch.site().join("torchgen/packaged/ATen/native/native_functions.yaml")
}

/// Fails with the reason if GPUs cannot be simulated.
pub fn check_possible(libtorch: &Libtorch) -> Result<()> {
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

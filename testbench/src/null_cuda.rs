//! Null CUDA: the real libtorch_cuda on stand-ins for the libraries of CUDA, which `testbench/null_cuda/` builds.
//!
//! libtorch finds its libraries beside itself, so the stand-ins are not preloaded: a folder of links to the files of
//! libtorch has the stand-ins in the places of NVIDIA's libraries, and only what loads libtorch from there has them.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::compiled::{self, Unit};
use crate::libtorch::{Libtorch, without_build};
use crate::{paths, process, simulated_cuda};

/// The path of the sources, relative to the root of the repository.
pub const SOURCES: &str = "testbench/null_cuda";

/// The stand-ins know private parts of this libtorch, and the functions that it calls.
const LIBTORCH: &str = "2.13.0";

/// A stand-in for a library.
struct Library {
    /// Where libtorch looks for it, relative to the folder of Python's packages.
    place: &'static str,
    soname: &'static str,
    /// How the names of its functions begin, as a pattern, and the error that those return which are not here.
    functions: (&'static str, &'static str),
    /// How the paths of its sources begin.
    sources: &'static str,
}

const fn library(
    place: &'static str,
    soname: &'static str,
    functions: (&'static str, &'static str),
    sources: &'static str,
) -> Library {
    Library { place, soname, functions, sources }
}

/// The libraries of CUDA 13, whose symbols have versions.
const CUDA: &str = "nvidia/cu13/lib";

/// In the order of their dependencies: the others call the first.
const LIBRARIES: [Library; 6] = [
    library(CUDA, "libcudart.so.13", ("(__)?cuda", "801"), "runtime/"),
    library(CUDA, "libcublas.so.13", ("cublas(?!Lt)", "15"), "libraries/cublas."),
    library(CUDA, "libcublasLt.so.13", ("cublasLt", "15"), "libraries/cublaslt."),
    library(CUDA, "libnvrtc.so.13", ("nvrtc", "11"), "libraries/nvrtc."),
    library("nvidia/nccl/lib", "libnccl.so.2", ("nccl", "4"), "libraries/nccl"),
    // The driver is no part of the wheels; libtorch looks for it where its own libraries are, too.
    library("torch/lib", "libcuda.so.1", ("cu(?!File)", "801"), "libraries/driver."),
];

/// The library of values takes the place of libtorch_cuda, which it loads under this name.
const REAL: &str = "libtorch_cuda_real.so";

/// How the paths of its sources begin.
const VALUES: &str = "values/";

/// What the libraries take of the simulated GPUs, by how the paths of their own sources begin.
const SIMULATED: [(&str, &[&str]); 2] = [
    (LIBRARIES[0].sources, &["faults.cpp", "settings.cpp"]),
    (VALUES, &["cells.cpp", "costs.cpp", "semantics.cpp"]),
];

/// The files here whose names end with `end`.
fn files(end: &str) -> Result<Vec<PathBuf>> {
    paths::files_below(SOURCES, end)
}

/// The sources of the library whose paths begin so.
fn sources(start: &str) -> Result<Vec<PathBuf>> {
    let start = paths::root().join(SOURCES).display().to_string() + "/" + start;
    let mut sources = files(".cpp")?;
    sources.retain(|path| path.display().to_string().starts_with(&start));
    let folder = paths::root().join(simulated_cuda::SOURCES);
    let taken =
        SIMULATED.iter().filter(|(of, _)| start.ends_with(of)).flat_map(|(_, names)| *names);
    sources.extend(taken.map(|name| folder.join(name)));
    Ok(sources)
}

/// What kernels leave in the memory of the devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numbers {
    /// Nothing: they do nothing.
    None,
    /// The numbers of the CPU's kernels.
    Cpu,
}

impl Numbers {
    fn folder(self) -> &'static str {
        match self {
            Self::None => "plain",
            Self::Cpu => "values",
        }
    }
}

/// The built stand-ins.
#[derive(Debug)]
pub struct NullCuda {
    folder: PathBuf,
}

impl NullCuda {
    /// Builds the stand-ins for this libtorch, unless that was done before.
    pub fn provide(libtorch: &Libtorch) -> Result<Self> {
        check_possible(libtorch)?;
        let files = [paths::files(simulated_cuda::SOURCES, "")?, files("")?].concat();
        let build = |folder: &Path| build(libtorch, folder);
        let folder = compiled::provide("null_cuda", libtorch, &files, build)?;
        Ok(Self { folder })
    }

    /// Makes `command` and the processes that it starts use the real libtorch_cuda on the stand-ins.
    pub fn apply(&self, numbers: Numbers, command: &mut Command) {
        compiled::search_first(&self.packages(numbers).join("torch/lib"), command);
    }

    /// Like [`apply`](Self::apply) for a Python, whose torch loads libtorch from its own folder.
    pub fn apply_to_python(&self, numbers: Numbers, python: &mut Command) {
        self.apply(numbers, python);
        python.env("PYTHONPATH", self.packages(numbers));
    }

    /// A folder of Python's packages, with links to torch and to NVIDIA's libraries.
    fn packages(&self, numbers: Numbers) -> PathBuf {
        self.folder.join(numbers.folder())
    }
}

/// Fails with the reason if the real libtorch_cuda cannot be run on stand-ins.
pub fn check_possible(libtorch: &Libtorch) -> Result<()> {
    ensure!(
        cfg!(all(target_os = "linux", target_arch = "x86_64")),
        "null CUDA is made for Linux on x86-64"
    );
    ensure!(
        libtorch.has_cuda(),
        "the libtorch in {} is one without CUDA: set LIBTORCH to a CUDA build, or unset it to have one downloaded",
        libtorch.root.display()
    );
    ensure!(
        without_build(&libtorch.version) == LIBTORCH,
        "null CUDA is made for the functions and the private parts of libtorch {LIBTORCH}, and this is {}: use \
         `cargo xtask simulate`, which works with every supported version",
        libtorch.version
    );
    let headers = libtorch.site().join("nvidia/cu13/include/cuda_runtime_api.h");
    ensure!(
        headers.is_file(),
        "there is no {}: null CUDA needs the libtorch of a PyTorch wheel for CUDA 13, and the wheels that come with \
         it; unset LIBTORCH to have them downloaded",
        headers.display()
    );
    Ok(())
}

/// Builds all libraries.
fn build(libtorch: &Libtorch, folder: &Path) -> Result<()> {
    let site = libtorch.site();
    let unit = Unit {
        libtorch,
        folder,
        // cublas.h includes these headers, which need one of libcu++, and uses nothing of them.
        flags: &[
            "-fvisibility=hidden",
            "-D__CUDA_FP16_H__",
            "-D__CUDA_BF16_H__",
            "-D__CUDA_FP8_H__",
        ],
        // The wheel of CUDA's runtime has no crt/, but Triton's has.
        system: vec![
            site.join("nvidia/cu13/include"),
            site.join("nvidia/nccl/include"),
            site.join("triton/backends/nvidia/include"),
        ],
        own: vec![paths::root().join(simulated_cuda::SOURCES)],
        headers: [paths::files(simulated_cuda::SOURCES, ".h")?, files(".h")?].concat(),
    };
    LIBRARIES.iter().try_for_each(|library| build_library(&unit, library))?;
    build_values(&unit)?;
    [Numbers::None, Numbers::Cpu].into_iter().try_for_each(|numbers| link_packages(&unit, numbers))
}

fn build_library(unit: &Unit<'_>, library: &Library) -> Result<()> {
    let soname = library.soname;
    let mut objects = unit.compile(&sources(library.sources)?)?;
    objects.extend(unit.compile(&[write_stubs(unit, library, &objects)?])?);
    let mut linker = unit.linker(soname, &objects);
    if library.place == CUDA {
        let script = unit.folder.join(format!("{soname}.map"));
        paths::write(&script, &format!("{soname} {{ global: *; }};\n"))?;
        linker.arg(format!("-Wl,--version-script={}", script.display()));
    }
    if soname != LIBRARIES[0].soname {
        linker.arg(unit.folder.join(LIBRARIES[0].soname));
    }
    process::run(&mut linker)
}

/// A source with the functions that libtorch imports and the stand-in lacks.
fn write_stubs(unit: &Unit<'_>, library: &Library, objects: &[PathBuf]) -> Result<PathBuf> {
    let stubs = unit.folder.join(format!("{}-stubs.cpp", library.soname));
    let (pattern, error) = library.functions;
    let mut script = compiled::python(unit.libtorch, SOURCES, "libraries/stubs.py");
    script.args([pattern, error]).arg(&stubs).args(objects).arg("--");
    let mut libraries = paths::entries(&unit.libtorch.lib())?;
    libraries.retain(|path| path.extension().is_some_and(|kind| kind == "so"));
    script.args(libraries);
    script.arg(unit.libtorch.site().join("nvidia/cu13/lib/libcusolver.so.12"));
    process::run(&mut script)?;
    Ok(stubs)
}

fn build_values(unit: &Unit<'_>) -> Result<()> {
    // Under the name that the library asks for there is the real libtorch_cuda when it runs.
    process::run(&mut unit.linker(REAL, &[]))?;
    let mut linker = unit.linker("libtorch_cuda.so", &unit.compile(&sources(VALUES)?)?);
    linker.arg("-Wl,--no-as-needed").arg(unit.folder.join(REAL));
    linker.arg("-L").arg(unit.libtorch.lib()).args(["-lc10_cuda", "-ltorch_cpu", "-lc10"]);
    linker.arg(unit.folder.join(LIBRARIES[0].soname));
    // As libtorch's own libraries do.
    linker.arg("-Wl,--disable-new-dtags,-rpath,$ORIGIN/../../nvidia/cu13/lib:$ORIGIN");
    // What libtorch's libraries need is searched for where they are when they run.
    process::run(linker.arg("-Wl,--unresolved-symbols=ignore-all"))
}

/// Links to torch and to NVIDIA's libraries, with the stand-ins in their places.
fn link_packages(unit: &Unit<'_>, numbers: Numbers) -> Result<()> {
    let packages = paths::make_empty(unit.folder.join(numbers.folder()))?;
    for Library { place, soname, .. } in &LIBRARIES {
        link(&unit.folder.join(soname), &paths::make(packages.join(place))?.join(soname))?;
    }
    if numbers == Numbers::Cpu {
        let (lib, name) = (packages.join("torch/lib"), "libtorch_cuda.so");
        link(&unit.folder.join(name), &lib.join(name))?;
        link(&unit.libtorch.lib().join(name), &lib.join(REAL))?;
    }
    for name in ["torch", "torch/lib", "nvidia", CUDA, "nvidia/nccl/lib"] {
        link_all(&unit.libtorch.site().join(name), &packages.join(name))?;
    }
    Ok(())
}

/// Links to everything in a folder that is not in the other one.
fn link_all(from: &Path, to: &Path) -> Result<()> {
    for path in paths::entries(from)? {
        let there = to.join(paths::name(&path));
        if there.symlink_metadata().is_err() {
            link(&path, &there)?;
        }
    }
    Ok(())
}

fn link(file: &Path, place: &Path) -> Result<()> {
    symlink(file, place).with_context(|| format!("{} cannot be linked", place.display()))
}

#[cfg(test)]
mod tests {
    use std::{env, fs};

    use super::*;
    use crate::libtorch::Rule;

    fn libtorch(name: &str, version: &str, has_cuda: bool) -> Libtorch {
        let root = env::temp_dir().join(format!("testbench-{name}-{}", std::process::id()));
        fs::create_dir_all(root.join("lib")).unwrap();
        if has_cuda {
            fs::write(root.join("lib/libtorch_cuda.so"), "").unwrap();
        }
        Libtorch { root, version: version.into(), rule: Rule::Cache, python: None }
    }

    #[test]
    fn a_libtorch_that_it_is_not_made_for_is_refused_with_the_reason() {
        for (name, version, has_cuda, reason) in [
            ("cpu", "2.13.0+cpu", false, "without CUDA"),
            ("older", "2.11.0+cu130", true, "and this is 2.11.0+cu130"),
            ("newer", "2.14.0", true, "and this is 2.14.0"),
            ("alone", "2.13.0+cu126", true, "for CUDA 13"),
        ] {
            let libtorch = libtorch(name, version, has_cuda);
            let error = check_possible(&libtorch).unwrap_err().to_string();
            fs::remove_dir_all(&libtorch.root).unwrap();
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn every_source_belongs_to_one_library() {
        let starts = LIBRARIES.iter().map(|library| library.sources).chain([VALUES]);
        let mut named: Vec<_> = starts.flat_map(|start| sources(start).unwrap()).collect();
        named.retain(|path| path.starts_with(paths::root().join(SOURCES)));
        named.sort();
        assert_eq!(named, files(".cpp").unwrap());
    }
}

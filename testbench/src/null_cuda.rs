//! Null CUDA: the real libtorch_cuda on stand-ins for the libraries of CUDA, which `testbench/null_cuda/` builds.
//!
//! libtorch finds its libraries beside itself, so the stand-ins are not preloaded: a folder of links to the files of
//! libtorch has the stand-ins in the places of NVIDIA's libraries, and only what loads libtorch from there has them.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::compiled::{self, Unit, cxx};
use crate::libtorch::{Libtorch, without_build};
use crate::paths::files;
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
    /// The version of its symbols, if they have one.
    is_versioned: bool,
    /// How the names of its functions begin, as a pattern, and the error that those return which are not here.
    functions: (&'static str, &'static str),
    sources: &'static [&'static str],
}

/// In the order of their dependencies: the others call the first.
const LIBRARIES: [Library; 6] = [
    Library {
        place: "nvidia/cu13/lib",
        soname: "libcudart.so.13",
        is_versioned: true,
        functions: ("(__)?cuda", "801"),
        sources: &[
            "runtime/captures.cpp",
            "runtime/copies.cpp",
            "runtime/devices.cpp",
            "runtime/errors.cpp",
            "runtime/events.cpp",
            "runtime/graphs.cpp",
            "runtime/kernels.cpp",
            "runtime/memory.cpp",
            "runtime/pinned.cpp",
            "runtime/record.cpp",
            "runtime/streams.cpp",
            "runtime/variables.cpp",
            "../simulated_cuda/settings.cpp",
        ],
    },
    Library {
        place: "nvidia/cu13/lib",
        soname: "libcublas.so.13",
        is_versioned: true,
        functions: ("cublas(?!Lt)", "15"),
        sources: &["libraries/cublas.cpp"],
    },
    Library {
        place: "nvidia/cu13/lib",
        soname: "libcublasLt.so.13",
        is_versioned: true,
        functions: ("cublasLt", "15"),
        sources: &["libraries/cublaslt.cpp"],
    },
    Library {
        place: "nvidia/cu13/lib",
        soname: "libnvrtc.so.13",
        is_versioned: true,
        functions: ("nvrtc", "11"),
        sources: &["libraries/nvrtc.cpp"],
    },
    Library {
        place: "nvidia/nccl/lib",
        soname: "libnccl.so.2",
        is_versioned: false,
        functions: ("nccl", "4"),
        sources: &["libraries/nccl.cpp", "libraries/ranks.cpp", "libraries/reductions.cpp"],
    },
    // The driver is no part of the wheels; libtorch looks for it where its own libraries are, too.
    Library {
        place: "torch/lib",
        soname: "libcuda.so.1",
        is_versioned: false,
        functions: ("cu(?!File)", "801"),
        sources: &["libraries/driver.cpp"],
    },
];

/// The library of values takes the place of libtorch_cuda, which it loads under this name.
const REAL: &str = "libtorch_cuda_real.so";
const VALUES: [&str; 10] = [
    "values/allocations.cpp",
    "values/computation.cpp",
    "values/counters.cpp",
    "values/model.cpp",
    "values/numbers.cpp",
    "values/operators.cpp",
    "values/views.cpp",
    "../simulated_cuda/cells.cpp",
    "../simulated_cuda/costs.cpp",
    "../simulated_cuda/semantics.cpp",
];

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
        let mut sources = files(simulated_cuda::SOURCES, "")?;
        for folder in ["", "/libraries", "/runtime", "/values"] {
            sources.extend(files(&format!("{SOURCES}{folder}"), "")?);
        }
        let build = |folder: &Path| Build::new(libtorch, folder)?.all();
        let folder = compiled::provide("null_cuda", libtorch, &sources, build)?;
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

/// One build of all libraries.
struct Build<'a> {
    libtorch: &'a Libtorch,
    folder: &'a Path,
    unit: Unit<'a>,
}

impl<'a> Build<'a> {
    fn new(libtorch: &'a Libtorch, folder: &'a Path) -> Result<Self> {
        let site = libtorch.site();
        let mut headers = files(simulated_cuda::SOURCES, ".h")?;
        for each in ["", "/libraries", "/runtime", "/values"] {
            headers.extend(files(&format!("{SOURCES}{each}"), ".h")?);
        }
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
            headers,
        };
        Ok(Self { libtorch, folder, unit })
    }

    fn all(&self) -> Result<()> {
        for library in &LIBRARIES {
            self.library(library)?;
        }
        self.values()?;
        for numbers in [Numbers::None, Numbers::Cpu] {
            self.packages(&self.folder.join(numbers.folder()), numbers)?;
        }
        Ok(())
    }

    fn compile(&self, names: &[&str]) -> Result<Vec<PathBuf>> {
        let sources = names.iter().map(|name| paths::root().join(SOURCES).join(name));
        self.unit.compile(&sources.collect::<Vec<_>>())
    }

    fn library(&self, library: &Library) -> Result<()> {
        let Library { soname, is_versioned, .. } = *library;
        let mut objects = self.compile(library.sources)?;
        let stubs = self.stubs(library, &objects)?;
        objects.extend(self.unit.compile(&[stubs])?);
        let mut linker = self.linker(soname, &objects);
        if is_versioned {
            let script = self.folder.join(format!("{soname}.map"));
            fs::write(&script, format!("{soname} {{ global: *; }};\n"))?;
            linker.arg(format!("-Wl,--version-script={}", script.display()));
        }
        if soname != LIBRARIES[0].soname {
            linker.arg(self.folder.join(LIBRARIES[0].soname));
        }
        process::run(&mut linker)
    }

    /// A source with the functions that libtorch imports and the stand-in lacks.
    fn stubs(&self, library: &Library, objects: &[PathBuf]) -> Result<PathBuf> {
        let stubs = self.folder.join(format!("{}-stubs.cpp", library.soname));
        let (pattern, error) = library.functions;
        let mut script = compiled::python(self.libtorch, SOURCES, "libraries/stubs.py");
        script.args([pattern, error]).arg(&stubs).args(objects).arg("--");
        script.args(shared_libraries(&self.libtorch.lib())?);
        script.arg(self.libtorch.site().join("nvidia/cu13/lib/libcusolver.so.12"));
        process::run(&mut script)?;
        Ok(stubs)
    }

    fn values(&self) -> Result<()> {
        // Under the name that the library asks for there is the real libtorch_cuda when it runs.
        let empty = self.folder.join(REAL);
        process::run(&mut self.linker(REAL, &[]))?;
        let mut linker = self.linker("libtorch_cuda.so", &self.compile(&VALUES)?);
        linker.arg("-Wl,--no-as-needed").arg(&empty).arg("-L").arg(self.libtorch.lib());
        linker.args(["-lc10_cuda", "-ltorch_cpu", "-lc10"]);
        linker.arg(self.folder.join(LIBRARIES[0].soname));
        // As libtorch's own libraries do.
        linker.arg("-Wl,--disable-new-dtags,-rpath,$ORIGIN/../../nvidia/cu13/lib:$ORIGIN");
        // What libtorch's libraries need is searched for where they are when they run.
        process::run(linker.arg("-Wl,--unresolved-symbols=ignore-all"))
    }

    fn linker(&self, soname: &str, objects: &[PathBuf]) -> Command {
        let mut linker = cxx();
        linker.args(["-shared", "-o"]).arg(self.folder.join(soname)).args(objects);
        linker.arg(format!("-Wl,-soname,{soname}"));
        linker
    }

    /// Links to torch and to NVIDIA's libraries, with the stand-ins in their places.
    fn packages(&self, packages: &Path, numbers: Numbers) -> Result<()> {
        if packages.exists() {
            fs::remove_dir_all(packages)?;
        }
        let site = self.libtorch.site();
        let mut own: Vec<(PathBuf, PathBuf)> = LIBRARIES
            .iter()
            .map(|library| {
                (Path::new(library.place).join(library.soname), self.folder.join(library.soname))
            })
            .collect();
        if numbers == Numbers::Cpu {
            let lib = Path::new("torch/lib");
            own.push((lib.join("libtorch_cuda.so"), self.folder.join("libtorch_cuda.so")));
            own.push((lib.join(REAL), self.libtorch.lib().join("libtorch_cuda.so")));
        }
        for name in [
            "torch",
            "torch/lib",
            "nvidia",
            "nvidia/cu13",
            "nvidia/cu13/lib",
            "nvidia/nccl",
            "nvidia/nccl/lib",
        ] {
            fs::create_dir_all(packages.join(name))?;
        }
        for (place, file) in &own {
            link(file, &packages.join(place))?;
        }
        for name in ["torch", "torch/lib", "nvidia", "nvidia/cu13/lib", "nvidia/nccl/lib"] {
            link_all(&site.join(name), &packages.join(name))?;
        }
        Ok(())
    }
}

/// Links to everything in a folder that is not in the other one.
fn link_all(from: &Path, to: &Path) -> Result<()> {
    let entries =
        fs::read_dir(from).with_context(|| format!("{} cannot be read", from.display()))?;
    for entry in entries {
        let entry = entry?;
        let there = to.join(entry.file_name());
        if there.symlink_metadata().is_err() {
            link(&entry.path(), &there)?;
        }
    }
    Ok(())
}

fn link(file: &Path, place: &Path) -> Result<()> {
    symlink(file, place).with_context(|| format!("{} cannot be linked", place.display()))
}

fn shared_libraries(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut libraries = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|kind| kind == "so") {
            libraries.push(path);
        }
    }
    libraries.sort();
    Ok(libraries)
}

#[cfg(test)]
mod tests {
    use std::env;

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
        let named = LIBRARIES.iter().flat_map(|library| library.sources).chain(&VALUES);
        let mut named: Vec<_> =
            named.filter(|name| !name.starts_with("..")).map(|name| (*name).to_owned()).collect();
        let mut there = Vec::new();
        for folder in ["libraries", "runtime", "values"] {
            for file in files(&format!("{SOURCES}/{folder}"), ".cpp").unwrap() {
                there.push(format!("{folder}/{}", file.file_name().unwrap().display()));
            }
        }
        named.sort();
        there.sort();
        assert_eq!(named, there);
    }
}

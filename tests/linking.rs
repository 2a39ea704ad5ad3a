//! A program that depends on this crate has CUDA if its libtorch has it.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use tch::Device;
use tch_amp::autocast::is_autocast_enabled;

/// The shared libraries that are mapped into this process.
fn loaded() -> BTreeSet<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("Linux has /proc");
    maps.lines().filter_map(|line| line.split_whitespace().nth(5)).map(PathBuf::from).collect()
}

fn named<'a>(libraries: &'a BTreeSet<PathBuf>, name: &str) -> Option<&'a Path> {
    libraries
        .iter()
        .map(PathBuf::as_path)
        .find(|path| path.file_name().is_some_and(|file| file == name))
}

#[test]
fn libtorch_cuda_is_loaded_if_libtorch_has_it() {
    // Any use of the crate: a program that uses none of its items is not linked to it.
    assert!(!is_autocast_enabled(Device::Cpu));
    let libraries = loaded();
    let cpu = named(&libraries, "libtorch_cpu.so").expect("libtorch is loaded");
    let has_cuda = cpu.with_file_name("libtorch_cuda.so").exists();
    assert_eq!(named(&libraries, "libtorch_cuda.so").is_some(), has_cuda);
    if !has_cuda {
        assert!(!testkit::is_set("TCH_AMP_REQUIRE_CUDA"), "this libtorch has no CUDA library");
        testkit::skipped("this libtorch has no CUDA library to load");
    }
}

/// Links the shim into a shared library, as a Rust library for Python has it.
fn shared_library(libraries: &BTreeSet<PathBuf>, path: &Path) {
    let archive = Path::new(env!("OUT_DIR")).join("libtamp.a");
    let cpu = named(libraries, "libtorch_cpu.so").expect("libtorch is loaded");
    let lib = cpu.parent().expect("a library is in a folder");
    let mut link = Command::new(std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned()));
    link.args(["-shared", "-o"]).arg(path).arg("-Wl,--whole-archive").arg(archive);
    link.args(["-Wl,--no-whole-archive", "-Wl,--no-as-needed"]);
    let names = ["libtorch_cuda.so", "libtorch_cpu.so", "libc10.so"];
    link.args(names.map(|name| lib.join(name)).iter().filter(|library| library.exists()));
    link.arg(format!("-Wl,-rpath,{}", lib.display()));
    assert!(link.status().expect("the linker runs").success());
}

/// Python's engine runs Python's hooks. It is refused and goes on, whether torch or this crate is loaded first.
#[test]
fn an_engine_of_python_is_refused_and_goes_on() {
    assert!(!is_autocast_enabled(Device::Cpu));
    let Some(oracle) = testkit::python::Oracle::find("engine.py") else { return };
    if !Path::new(env!("OUT_DIR")).join("libtamp.a").exists() {
        testkit::skipped("a machine without a build of the shim");
        return;
    }
    let name = format!("libtch_amp_engine_{}.so", std::process::id());
    let path = std::env::temp_dir().join(name);
    shared_library(&loaded(), &path);
    for order in ["after", "before"] {
        // Not by the server of the oracles, which has loaded torch before.
        let output = oracle.command().arg(order).arg(&path).output().expect("Python starts");
        let want = "torch::autograd::python::PythonEngine\n1 [4.0, 4.0, 4.0]\n";
        assert_eq!(String::from_utf8_lossy(&output.stdout), want, "{order}: {output:?}");
    }
    std::fs::remove_file(&path).expect("the library was written");
}

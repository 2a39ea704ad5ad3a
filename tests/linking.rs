//! A program that depends on this crate has CUDA if its libtorch has it.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

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

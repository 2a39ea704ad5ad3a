//! Facts about the computer, for the reports.

use std::fs;
use std::path::{Path, PathBuf};
use tch::Device;

/// The device in words, with the model of a CPU.
pub fn device(device: Device) -> String {
    match device {
        Device::Cpu => cpu_model().map_or_else(|| "CPU".into(), |model| format!("CPU, {model}")),
        other => format!("{other:?}"),
    }
}

fn cpu_model() -> Option<String> {
    let info = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = info.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// Reads libtorch's version from a file beside the library, since tch has no call for it.
pub fn torch_version() -> Option<String> {
    let root = loaded_libtorch()?.parent()?.parent()?.to_owned();
    let plain = fs::read_to_string(root.join("build-version")).ok();
    plain.map(|text| text.trim().to_owned()).or_else(|| wheel_version(&root))
}

fn wheel_version(root: &Path) -> Option<String> {
    let text = fs::read_to_string(root.join("version.py")).ok()?;
    let value = text.lines().find_map(|line| line.strip_prefix("__version__ = "))?;
    Some(value.trim_matches(['\'', '"']).to_owned())
}

fn loaded_libtorch() -> Option<PathBuf> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let line = maps.lines().find(|line| line.contains("/libtorch_cpu.so"))?;
    Some(line[line.find('/')?..].into())
}

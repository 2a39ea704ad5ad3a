//! Facts about the computer, for the reports.

use std::fs;
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

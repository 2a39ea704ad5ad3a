//! The CUDA devices: according to Python's torch if there is one, otherwise to nvidia-smi.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, anyhow};
use serde_json::Value;

use crate::process;

/// A CUDA device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Gpu {
    pub(crate) name: String,
    /// Major and minor compute capability.
    pub(crate) capability: (u64, u64),
}

impl Gpu {
    /// Whether tensor cores multiply in fp16.
    pub(crate) fn has_fast_fp16(&self) -> bool {
        self.capability >= (7, 0)
    }

    /// Whether tensor cores multiply in bf16.
    pub(crate) fn has_fast_bf16(&self) -> bool {
        self.capability >= (8, 0)
    }
}

/// Prints the devices that torch can use, or why it can use none. Importing torch never fails for lack of a GPU.
const PRINT_DEVICES: &str = r#"
import json, torch
devices, error = [], None
try:
    torch.cuda.init()
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        devices.append({"name": torch.cuda.get_device_name(index), "major": major, "minor": minor})
except Exception as problem:
    error = str(problem)
print(json.dumps({"devices": devices, "error": error}))
"#;

/// The devices that the torch of `python` can use, or an error with the reason why it can use none.
pub(crate) fn usable(python: &Path) -> Result<Vec<Gpu>> {
    let printed = process::read(Command::new(python).args(["-c", PRINT_DEVICES]))?;
    // Warnings may precede the report.
    let report = printed.lines().last().unwrap_or_default();
    let report = serde_json::from_str(report).context("Python prints no JSON")?;
    devices(&report)
}

fn devices(report: &Value) -> Result<Vec<Gpu>> {
    if let Some(error) = report["error"].as_str() {
        return Err(anyhow!("{}", error.lines().next().unwrap_or(error)));
    }
    let devices = report["devices"].as_array().context("Python names no devices")?;
    let gpus = devices.iter().filter_map(|device| {
        let capability = (device["major"].as_u64()?, device["minor"].as_u64()?);
        Some(Gpu { name: device["name"].as_str()?.to_owned(), capability })
    });
    Ok(gpus.collect())
}

/// The devices that the driver lists, whether or not libtorch can use them.
pub(crate) fn listed() -> Option<Vec<Gpu>> {
    let query = ["--query-gpu=name,compute_cap", "--format=csv,noheader"];
    let table = process::read(Command::new("nvidia-smi").args(query)).ok()?;
    Some(table.lines().filter_map(row).collect())
}

/// Parses a row `name, major.minor`.
fn row(line: &str) -> Option<Gpu> {
    let (name, capability) = line.rsplit_once(',')?;
    let (major, minor) = capability.trim().split_once('.')?;
    let capability = (major.parse().ok()?, minor.parse().ok()?);
    Some(Gpu { name: name.trim().to_owned(), capability })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn devices_are_read_from_the_report() {
        let device = json!({"name": "NVIDIA H200", "major": 9, "minor": 0});
        let gpus = devices(&json!({"devices": [device], "error": null})).unwrap();
        assert_eq!(gpus, [Gpu { name: "NVIDIA H200".into(), capability: (9, 0) }]);
    }

    #[test]
    fn the_first_line_of_the_reason_is_kept() {
        let report = json!({"devices": [], "error": "no driver\nlong advice"});
        assert_eq!(devices(&report).unwrap_err().to_string(), "no driver");
    }

    #[test]
    fn rows_of_nvidia_smi_are_read() {
        let gpu = Gpu { name: "NVIDIA A100, 80GB".into(), capability: (8, 0) };
        assert_eq!(row("NVIDIA A100, 80GB, 8.0"), Some(gpu));
        assert_eq!(row("No devices were found"), None);
    }

    #[test]
    fn fp16_is_fast_one_generation_before_bf16() {
        let speed = |capability| {
            let gpu = Gpu { name: String::new(), capability };
            (gpu.has_fast_fp16(), gpu.has_fast_bf16())
        };
        assert_eq!(speed((6, 1)), (false, false));
        assert_eq!(speed((7, 5)), (true, false));
        assert_eq!(speed((8, 0)), (true, true));
    }
}

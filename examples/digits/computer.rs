//! The computer of a run: facts for the report, and the peak memory if the system reports it.

use super::options::Options;
use anyhow::Result;
use std::fs;
use std::path::{Path, PathBuf};
use tch::Device;
use tch_amp::memory;

/// Facts about the run, for the report.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The device, in words.
    pub device: String,
    /// The number of CPU threads that libtorch uses.
    pub threads: i32,
    /// The version of the loaded libtorch, if it is known.
    pub torch: Option<String>,
    /// The seed of the command line.
    pub seed: i64,
    /// The value of the command line.
    pub epochs: usize,
}

impl Facts {
    /// Collects the facts.
    pub fn gather(options: &Options) -> Result<Self> {
        let device = match options.device()? {
            Device::Cpu => {
                cpu_model().map_or_else(|| "CPU".into(), |model| format!("CPU, {model}"))
            }
            other => format!("{other:?}"),
        };
        let device = match options.ranks {
            Some(ranks) => format!("{device}, {ranks} ranks"),
            None => device,
        };
        let Options { seed, epochs, .. } = *options;
        Ok(Self { device, threads: tch::get_num_threads(), torch: torch_version(), seed, epochs })
    }
}

fn cpu_model() -> Option<String> {
    let info = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = info.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// Reads libtorch's version from a file beside the library, since tch has no call for it.
fn torch_version() -> Option<String> {
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

/// The largest resident size of the process since `start`, including libtorch and memory left by earlier runs.
#[derive(Debug)]
pub struct PeakMemory(());

impl PeakMemory {
    /// Resets the high-water mark; `None` if that is not permitted, or if the run is not on the CPU.
    pub fn start(device: Device) -> Option<Self> {
        (device == Device::Cpu && memory::reset_peak_resident()).then_some(Self(()))
    }

    /// Bytes.
    pub fn read(&self) -> Option<u64> {
        Some(memory::resident()?.peak)
    }
}

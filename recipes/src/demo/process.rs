//! A run in a process of its own, so that its peak memory is its own, too.

use crate::demo::gpt::train::{Options, Run};
use crate::precision_name;
use anyhow::{Context, Result, ensure};
use std::env;
use std::process::{Command, Stdio};
use tch::Device;

/// The argument that makes this program such a process: the options, as JSON, and the device follow.
pub const ARGUMENT: &str = "--gpt-run";

/// Trains in another process of this program, whose progress is shown.
pub fn run(options: Options, device: Device) -> Result<Run> {
    let device = if device == Device::Cpu { "cpu" } else { "cuda" };
    let program = env::current_exe().context("this program does not know where it is")?;
    let child = Command::new(program)
        .args([ARGUMENT, &serde_json::to_string(&options)?, device])
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context("cannot start another process of this program")?;
    ensure!(
        child.status.success(),
        "the {} run failed ({})",
        precision_name(options.precision),
        child.status
    );
    serde_json::from_slice(&child.stdout).context("the other process printed no run")
}

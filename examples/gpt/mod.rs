//! A small language model over bytes, trained on Rust sources. `examples/demo` and `tests/demo.rs` run it.

pub mod data;
pub mod model;
pub mod progress;
pub mod report;
pub mod train;

use anyhow::Result;
use data::Text;
use progress::Progress;
use tch::Device;
use train::{Options, Run};

/// Trains once in this process, with or without progress on stderr.
pub fn run(options: Options, text: &Text, device: Device, progress: bool) -> Result<Run> {
    let progress =
        if progress { Progress::new(options.precision, options.steps)? } else { Progress::Silent };
    train::train(options, text, device, &progress)
}

/// The precision of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Precision {
    /// Without autocast.
    Fp32,
    /// bf16 autocast.
    Bf16,
}

impl Precision {
    /// The name in tables, plots, style sheets and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fp32 => "fp32",
            Self::Bf16 => "bf16",
        }
    }
}

//! The small language model in fp32 and in bf16. `examples/demo` and `tests/demo.rs` run it.

#[path = "../../gpt/data.rs"]
#[allow(dead_code, reason = "the recipe `gpt` also evaluates")]
pub mod data;
pub mod incident;
#[path = "../../gpt/model.rs"]
#[allow(dead_code, reason = "the recipe `gpt` also recomputes")]
pub mod model;
pub mod report;
pub mod train;

use crate::recipe::Progress;
use anyhow::Result;
use data::Text;
use tch::{Device, Kind, Tensor};
use train::{Options, Run};

/// Without a terminal, a line is printed after this many steps.
const LINE_STEPS: u64 = 50;

impl Text {
    /// Random excerpts of `length` bytes, one for each row, and what follows each of their bytes. The random numbers
    /// are libtorch's on the CPU.
    pub fn batch(&self, rows: i64, length: i64, device: Device) -> (Tensor, Tensor) {
        let starts = Tensor::randint(self.len() - length, [rows], (Kind::Int64, Device::Cpu));
        self.excerpts(&starts, length, device)
    }
}

/// Trains once in this process, with or without progress on stderr.
pub fn run(options: Options, text: &Text, device: Device, progress: bool) -> Result<Run> {
    let progress = if progress {
        let name = format!("GPT {}", options.precision.name());
        Progress::new(&name, options.steps as u64, LINE_STEPS)?
    } else {
        Progress::silent()
    };
    train::train(options, text, device, &progress)
}

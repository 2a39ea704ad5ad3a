//! The small language model in fp32 and in bf16.

pub mod incident;
pub mod report;
pub mod train;

use crate::Progress;
use crate::gpt::data::Text;
use crate::precision_name;
use anyhow::Result;
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
        let name = format!("GPT {}", precision_name(options.precision));
        Progress::new(&name, options.steps as u64, LINE_STEPS)?
    } else {
        Progress::silent()
    };
    train::train(options, text, device, &progress)
}

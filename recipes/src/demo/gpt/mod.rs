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

/// The runs in both precisions.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// What [`Amp::advice`](tch_amp::Amp::advice) said of the device before them.
    pub advice: String,
    /// Whether products in bf16 are measurably slower than in f32 here.
    pub is_slow: bool,
    pub fp32: Run,
    /// Where bf16 is slow, a run of fewer steps.
    pub bf16: Run,
}

impl Comparison {
    /// The steps of both runs, which alone can be compared.
    pub fn common_steps(&self) -> usize {
        self.fp32.losses.len().min(self.bf16.losses.len())
    }

    /// Whether bf16 took fewer steps than fp32.
    pub fn is_cut_short(&self) -> bool {
        self.bf16.losses.len() < self.fp32.losses.len()
    }

    /// How many steps bf16 took, in words.
    pub fn steps_taken(&self) -> String {
        let (taken, all) = (self.bf16.losses.len(), self.fp32.losses.len());
        if self.is_cut_short() {
            format!("only {taken} of the {all} steps")
        } else {
            format!("all {all} steps")
        }
    }

    /// The share of fp32's memory for activations that bf16 needs, in per cent, if both are known.
    pub fn memory_share(&self) -> Option<f64> {
        let (fp32, bf16) = (self.fp32.activations?, self.bf16.activations?);
        (fp32 > 0).then(|| 100.0 * bf16 as f64 / fp32 as f64)
    }
}

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
        Progress::new(&name, options.taken as u64, LINE_STEPS)?
    } else {
        Progress::silent()
    };
    train::train(options, text, device, &progress)
}

//! The command line.

use super::data::BATCH;
use crate::options::{below_target, cuda_is_usable, parse, parse_device, unknown};
use crate::precision_name;
use anyhow::{Result, bail};
use std::ffi::OsString;
use std::path::PathBuf;
use tch::Device;
use tch_amp::Amp;

/// What `--help` prints.
pub const USAGE: &str = "\
Trains a small GPT in fp32 and bf16, and a network for handwritten digits in
fp32, bf16 and fp16, and compares the runs.

Usage: demo [--gpt-steps N] [--device cpu|cuda] [--epochs N] [--seed N]
            [--out FILE] [--checkpoints FOLDER] [--resume] [--ranks N]

  --gpt-steps    steps of the GPT, default 200; 0 leaves it out
  --device       default: CUDA if it is usable, otherwise the CPU
  --epochs       passes over the digits, default 20
  --seed         initial weights and batch order, default 0
  --out          the HTML report, default target/demo-report.html
  --checkpoints  the folder for every epoch of the digits, default target/digits-checkpoints
  --resume       resume from that folder, with the same losses as an uninterrupted run
  --ranks        train the digits only, on N processes of this computer that average their
                 gradients over every batch; on the CPU";

const MOST_EPOCHS: usize = 1_000_000;

/// Without a terminal, a line is printed after this many epochs.
const LINE_EPOCHS: u64 = 5;

/// The options of the demo.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// The steps of the GPT, of which 0 leave it out; `None`: those of the usage.
    pub gpt_steps: Option<usize>,
    /// `None`: CUDA if it is usable, otherwise the CPU.
    pub device: Option<Device>,
    /// Passes over the training images.
    pub epochs: usize,
    /// Determines the initial weights and the order of the batches.
    pub seed: i64,
    /// The path of the report; `None`: see [`Options::report_path`].
    pub out: Option<PathBuf>,
    /// The folder that the runs are saved to; `None`: they are not saved.
    pub checkpoints: Option<PathBuf>,
    /// Whether to resume from that folder.
    pub resume: bool,
    /// The number of processes that train together; `None`: this one alone.
    pub ranks: Option<usize>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            gpt_steps: None,
            device: None,
            epochs: 20,
            seed: 0,
            out: None,
            checkpoints: None,
            resume: false,
            ranks: None,
        }
    }
}

impl Options {
    /// Parses the arguments; `None` if they ask for help.
    pub fn parse(args: impl IntoIterator<Item: Into<OsString>>) -> Result<Option<Self>> {
        let checkpoints = Some(below_target("digits-checkpoints"));
        let mut options = Self { checkpoints, ..Self::default() };
        let is_run = parse(args, |flag, args| {
            match flag {
                "--gpt-steps" => options.gpt_steps = Some(args.value()?),
                "--device" => options.device = Some(args.parsed(parse_device)?),
                "--epochs" => options.epochs = args.between(1, MOST_EPOCHS)?,
                "--seed" => options.seed = args.value()?,
                "--out" => options.out = Some(args.path()?),
                "--checkpoints" => options.checkpoints = Some(args.path()?),
                "--resume" => options.resume = true,
                // Every rank needs an image of each batch.
                "--ranks" => options.ranks = Some(args.between(1, BATCH as usize)?),
                _ => {
                    let known = USAGE.split_whitespace().filter(|word| word.starts_with("--"));
                    bail!("{}\n\n{USAGE}", unknown(flag, known))
                }
            }
            Ok(())
        })?;
        Ok(is_run.then_some(options))
    }

    /// The options of the run in a precision, with so many batches in an epoch.
    pub fn of(&self, precision: Amp, batches: usize) -> crate::Options {
        let steps = (self.epochs * batches) as u64;
        let folder = |path: &PathBuf| path.join(precision_name(precision));
        crate::Options {
            amp: precision,
            seed: self.seed,
            checkpoints: self.checkpoints.as_ref().map(folder),
            resume: self.resume,
            replaces: true,
            length: "--epochs",
            log_every: 1,
            eval_every: LINE_EPOCHS * batches as u64,
            save_every: batches as u64,
            ..crate::Options::silent("digits", steps)
        }
    }

    /// The device to train on.
    pub fn device(&self) -> Result<Device> {
        let usable = cuda_is_usable();
        match self.device {
            Some(Device::Cuda(_)) if self.ranks.is_some() => {
                bail!("--ranks trains on the CPU: use --device cpu")
            }
            None if self.ranks.is_some() => Ok(Device::Cpu),
            Some(Device::Cuda(_)) if !usable => bail!("CUDA is not usable here"),
            Some(device) => Ok(device),
            None if usable => Ok(Device::Cuda(0)),
            None => Ok(Device::Cpu),
        }
    }

    /// The path of the report: that of `--out`, or a file in `target/` of a checkout, or in the current folder.
    pub fn report_path(&self) -> PathBuf {
        self.out.clone().unwrap_or_else(|| below_target("demo-report.html"))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    fn parse(line: &str) -> Result<Option<Options>> {
        Options::parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn every_flag_sets_its_field() {
        let want = Options {
            gpt_steps: Some(7),
            device: Some(Device::Cpu),
            epochs: 3,
            seed: -7,
            out: Some("a.html".into()),
            checkpoints: Some("saved".into()),
            resume: true,
            ranks: Some(2),
        };
        let line = "--device cpu --epochs 3 --resume --seed -7 --out a.html --checkpoints saved \
                    --ranks 2 --gpt-steps 7";
        assert_eq!(parse(line).unwrap(), Some(want));
        let checkpoints = Some(below_target("digits-checkpoints"));
        assert_eq!(parse("").unwrap(), Some(Options { checkpoints, ..Options::default() }));
        assert_eq!(parse("--epochs 3 --help").unwrap(), None);
    }

    #[test]
    fn a_bad_command_line_names_the_argument() {
        for line in [
            "--epoch 3",
            "--epochs",
            "--epochs 0",
            "--epochs x",
            "--epochs 18446744073709551615",
            "--device tpu",
            "--ranks 0",
            "--ranks 65",
            "--ranks two",
        ] {
            let error = format!("{:#}", parse(line).unwrap_err());
            let flag = line.split_whitespace().next().unwrap();
            assert!(error.contains(flag), "{line}: {error}");
        }
    }
}

//! The command line.

use super::data::Data;
use crate::options::{Flag, OwnOptions};
use crate::{PRECISIONS, precision_name};
use anyhow::{Result, ensure};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use tch::Device;
use tch_amp::Amp;

/// The options of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Those that all recipes have.
    pub common: crate::Options,
    /// The folder of the images; `None`: Fashion-MNIST or digits.
    pub data: Option<PathBuf>,
    /// The precisions to compare; empty: that of `--amp` alone.
    pub compare: Vec<Amp>,
    /// Whether `--compare` names the precisions, so that none is left out.
    pub names_all: bool,
    pub width: i64,
    pub stages: u32,
    pub blocks: usize,
    pub rows: usize,
    pub lr: f64,
    pub swa_from: f64,
    pub swa_every: u64,
    pub swa_batches: usize,
    pub moved: i64,
    pub mirror: bool,
    pub channels_first: bool,
    pub sync_batch_norm: bool,
}

impl OwnOptions for Options {
    const ABOUT: [&'static str; 2] = [
        "\
Trains a residual network on images, and writes a report of it.

Usage: images [options]
",
        "
With --compare, each precision has a folder of its own below those of the checkpoints
and of the logs.

A GPU is used if there is one. It should get a larger network and more epochs, such as
  cargo run --release --example images -- --width 64 --stages 3 --blocks 3 --rows 512
    --lr 0.4 --steps 3000 --eval-every 300 --save-every 300 --compare all
On several GPUs, add --ranks N, and --sync-batch-norm if each has few images. On several
computers, start it on each of them by
  torchrun --no-python --nnodes ... -- target/release/examples/images ...
where the first -- keeps the options apart from those of torchrun.",
    ];

    const FLAGS: &'static [Flag<Self>] = &[
        (
            "--data",
            "a folder with the four files of a data set in the format of MNIST,\n\
             default Fashion-MNIST where Debian's package dataset-fashion-mnist is\n\
             installed, otherwise small handwritten digits",
            |it, args| args.path().map(|path| it.data = Some(path)),
        ),
        (
            "--compare",
            "train in several precisions, one after the other, and compare them:\n\
             a list such as off,bf16, or all, which leaves out fp16 on the CPU",
            |it, args| args.parsed(precisions).map(|all| (it.compare, it.names_all) = all),
        ),
        ("--width", "channels of the first stage, default 16", |it, args| {
            args.at_least(1).map(|width| it.width = width)
        }),
        (
            "--stages",
            "each has twice the channels of the one before, and images of half the\n\
             size, default 3",
            |it, args| args.between(1, 8).map(|stages| it.stages = stages),
        ),
        ("--blocks", "of a stage, default 1", |it, args| {
            args.at_least(1).map(|blocks| it.blocks = blocks)
        }),
        ("--rows", "images of a batch, on all ranks together, default 128", |it, args| {
            args.at_least(1).map(|rows| it.rows = rows)
        }),
        (
            "--lr",
            "the largest learning rate, after a warm-up of a tenth of the steps,\n\
             from which it falls to a fifth by a cosine, default 0.3",
            |it, args| args.finite().map(|lr| it.lr = lr),
        ),
        (
            "--swa-from",
            "the share of the steps after which the weights are averaged, and the\n\
             learning rate stays as it is, default 0.75",
            |it, args| args.between(0.0, 1.0).map(|share| it.swa_from = share),
        ),
        ("--swa-every", "steps from one average to the next, default 5", |it, args| {
            args.at_least(1).map(|every| it.swa_every = every)
        }),
        (
            "--swa-batches",
            "from which the averages get the statistics of batch normalization,\n\
             default 50",
            |it, args| args.between(1, 1_000_000).map(|batches| it.swa_batches = batches),
        ),
        ("--move", "pixels by which an image is moved at most, default 1", |it, args| {
            args.at_least(0).map(|pixels| it.moved = pixels)
        }),
        ("--mirror", "mirror half of the images, default with Fashion-MNIST only", |it, args| {
            args.turn_on(&mut it.mirror)
        }),
        ("--channels-first", "do not lay out images and weights channels-last", |it, args| {
            args.turn_on(&mut it.channels_first)
        }),
        (
            "--sync-batch-norm",
            "normalize with the statistics of the batch on all ranks together",
            |it, args| args.turn_on(&mut it.sync_batch_norm),
        ),
    ];

    fn common(&mut self) -> &mut crate::Options {
        &mut self.common
    }
}

impl Options {
    /// The defaults.
    pub fn new(common: crate::Options) -> Self {
        Self {
            common,
            data: None,
            compare: Vec::new(),
            names_all: false,
            width: 16,
            stages: 3,
            blocks: 1,
            rows: 128,
            lr: 0.3,
            swa_from: 0.75,
            swa_every: 5,
            swa_batches: 50,
            moved: 1,
            mirror: false,
            channels_first: false,
            sync_batch_norm: false,
        }
    }

    /// Parses the arguments; `None` after `--help`, which has printed the usage.
    pub fn parse(args: impl IntoIterator<Item: Into<OsString>>) -> Result<Option<Self>> {
        let common = crate::Options::new("images", STEPS);
        Self::new(crate::Options { eval_every: 100, save_every: 100, ..common }).take(args)
    }

    /// Fails if the ranks cannot have equally many images of a batch.
    pub fn check_ranks(&self, size: usize) -> Result<()> {
        let rows = self.rows;
        ensure!(rows.is_multiple_of(size), "--rows {rows} cannot be divided among {size} ranks");
        Ok(())
    }

    /// Fails if the images do not fit these options.
    pub fn check_data(&self, data: &Data) -> Result<()> {
        let (moved, most) = (self.moved, data.size[0].min(data.size[1]));
        ensure!(moved <= most as i64, "--move {moved}: the images have {most} pixels in a line");
        Ok(())
    }

    /// The options of each run, and whether fp16 is left out because it is slow on this device.
    pub fn runs(&self, device: Device) -> (Vec<Self>, bool) {
        if self.compare.is_empty() {
            return (vec![self.clone()], false);
        }
        let is_slow = |amp: &Amp| *amp == Amp::Fp16 && device == Device::Cpu && !self.names_all;
        let run = |amp: &Amp| {
            let below = |path: &Option<PathBuf>| {
                path.as_deref().map(|path: &Path| path.join(precision_name(*amp)))
            };
            let (checkpoints, logs) = (below(&self.common.checkpoints), below(&self.common.logs));
            let common = crate::Options {
                amp: *amp,
                wants_plan: false,
                checkpoints,
                logs,
                ..self.common.clone()
            };
            Self { common, ..self.clone() }
        };
        let runs = self.compare.iter().filter(|amp| !is_slow(amp)).map(run).collect();
        (runs, self.compare.iter().any(is_slow))
    }

    /// The options that a resumed run must have in common with its first part, because the numbers depend on them.
    /// Another number of ranks is possible; it rounds differently, and batch normalization has other statistics.
    pub fn of_run(&self, data: &Data) -> String {
        let Self { width, stages, blocks, rows, lr, swa_from, swa_every, moved, mirror, .. } = self;
        let crate::Options { steps, seed, .. } = &self.common;
        let amp = self.common.amp_of_run();
        let flag = |is_on, name| if is_on { name } else { "" };
        format!(
            "--amp {amp} --steps {steps} --seed {seed} --width {width} --stages {stages} --blocks {blocks} --rows {rows} \
             --lr {lr} --swa-from {swa_from} --swa-every {swa_every} --move {moved}{}{}{}, and {}",
            flag(*mirror, " --mirror"),
            flag(self.channels_first, " --channels-first"),
            flag(self.sync_batch_norm, " --sync-batch-norm"),
            data.identity()
        )
    }
}

/// A bit more than two epochs of Fashion-MNIST.
const STEPS: u64 = 1000;

/// The value of `--compare`, and whether it names each of the precisions.
fn precisions(text: &str) -> Result<(Vec<Amp>, bool)> {
    if text == "all" {
        return Ok((PRECISIONS.into(), false));
    }
    let mut all = Vec::new();
    for name in text.split(',') {
        let amp: Amp = name.parse()?;
        ensure!(amp != Amp::Auto, "auto is not a precision to compare");
        ensure!(!all.contains(&amp), "{name} is there twice");
        all.push(amp);
    }
    Ok((all, true))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    fn runs(line: &str, device: Device) -> (Vec<(Amp, PathBuf)>, bool) {
        let words = line.split_whitespace().map(str::to_owned);
        let options = Options::parse(words).unwrap().unwrap();
        let (runs, is_left_out) = options.runs(device);
        let run = |run: Options| (run.common.amp, run.common.checkpoints.unwrap());
        (runs.into_iter().map(run).collect(), is_left_out)
    }

    #[test]
    fn fp16_is_left_out_on_the_cpu_unless_it_is_asked_for() {
        let [fp32, bf16, fp16] = PRECISIONS;
        let precisions = |(runs, is_left_out): (Vec<(Amp, PathBuf)>, bool)| {
            (runs.into_iter().map(|run| run.0).collect::<Vec<_>>(), is_left_out)
        };
        let all = "--compare all";
        assert_eq!(precisions(runs(all, Device::Cpu)), (vec![fp32, bf16], true));
        assert_eq!(precisions(runs(all, Device::Cuda(0))), (vec![fp32, bf16, fp16], false));
        let named = runs("--compare fp16,off --checkpoints it", Device::Cpu);
        let folders = [(fp16, "it/fp16".into()), (fp32, "it/fp32".into())];
        assert_eq!(named, (folders.to_vec(), false));
        assert_eq!(runs("--amp fp16 --checkpoints it", Device::Cpu).0, [(fp16, "it".into())]);
        for bad in ["--compare fp8", "--compare off,off", "--swa-from 2", "--stages 9"] {
            assert!(Options::parse(bad.split(' ').map(str::to_owned)).is_err(), "{bad}");
        }
    }
}

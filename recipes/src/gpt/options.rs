//! The command line.

use super::data::Text;
use super::model::Config;
use anyhow::{Result, ensure};
use std::ffi::OsString;
use std::path::PathBuf;

/// What `--help` prints before the common options.
const USAGE: &str = "\
Trains a GPT over bytes, and writes a report of it.

Usage: gpt [options]

  --text         the file to learn, default the Rust sources of tch
  --width        of the model, a multiple of 64, default 256
  --layers       default 4
  --length       bytes of an excerpt, default 128
  --rows         excerpts of a micro-batch, on all ranks together, default 8
  --accumulate   micro-batches whose gradients are added up for a step, default 2
  --lr           the largest learning rate, after a warm-up of a tenth of the steps,
                 from which it falls to a tenth by a cosine, default 0.001
  --dropout      default 0.1
  --ema          the decay of the averaged weights, which are the ones that are
                 evaluated and that write the sample, default 0.99
  --recompute    keep no activations of the blocks, and compute them a second time
  --zero         divide the state of the optimizer among the ranks (ZeRO-1)
  --eval-every   steps from one evaluation on held-out text to the next, default 50
  --save-every   steps from one checkpoint to the next, default 50
  --log-every    steps from one line of the log to the next, default 10
  --sample       bytes to write at the end, default 300
";

/// What `--help` prints at the end.
const GPUS: &str = "
A GPU is used if there is one. It should get a larger model and longer texts, such as
  cargo run --release --example gpt -- --text FILE --width 768 --layers 12 --length 1024
    --rows 16 --accumulate 4 --steps 20000 --lr 0.0006 --ema 0.999
If its memory does not suffice, add --recompute, or take fewer --rows, and
--accumulate more of them. On several GPUs, add --ranks N and --zero. On several
computers, start it on each of them by
  torchrun --no-python --nnodes ... -- target/release/examples/gpt --zero ...
where the first -- keeps the options apart from those of torchrun.";

/// The options of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Those that all recipes have.
    pub common: crate::Options,
    /// The text; `None`: the sources of tch.
    pub text: Option<PathBuf>,
    pub width: i64,
    pub layers: i64,
    pub length: i64,
    pub rows: usize,
    pub micro_batches: usize,
    pub lr: f64,
    pub dropout: f64,
    pub ema: f64,
    pub recompute: bool,
    pub zero: bool,
    pub eval_every: u64,
    pub save_every: u64,
    pub log_every: u64,
    pub sample: usize,
}

impl Options {
    /// The defaults.
    pub fn new(common: crate::Options) -> Self {
        Self {
            common,
            text: None,
            width: 256,
            layers: 4,
            length: 128,
            rows: 8,
            micro_batches: 2,
            lr: 1e-3,
            dropout: 0.1,
            ema: 0.99,
            recompute: false,
            zero: false,
            eval_every: 50,
            save_every: 50,
            log_every: 10,
            sample: 300,
        }
    }

    /// Parses the arguments; `None` after `--help`, which has printed the usage.
    pub fn parse(args: impl IntoIterator<Item: Into<OsString>>) -> Result<Option<Self>> {
        let mut options = Self::new(crate::Options::new("gpt", 300));
        let mut common = options.common.clone();
        let is_run = common.parse(args, |flag, args| {
            match flag {
                "--text" => options.text = Some(args.path()?),
                "--width" => options.width = args.at_least(64)?,
                "--layers" => options.layers = args.at_least(1)?,
                "--length" => options.length = args.at_least(1)?,
                "--rows" => options.rows = args.at_least(1)?,
                "--accumulate" => options.micro_batches = args.between(1, 1_000_000)?,
                "--lr" => options.lr = args.finite()?,
                "--dropout" => options.dropout = args.between(0.0, 1.0)?,
                "--ema" => options.ema = args.between(0.0, 1.0)?,
                "--recompute" => options.recompute = true,
                "--zero" => options.zero = true,
                "--eval-every" => options.eval_every = args.at_least(1)?,
                "--save-every" => options.save_every = args.at_least(1)?,
                "--log-every" => options.log_every = args.at_least(1)?,
                "--sample" => options.sample = args.between(0, 1_000_000)?,
                _ => return Ok(false),
            }
            Ok(true)
        })?;
        if !is_run {
            crate::print(format_args!("{USAGE}{}\n{GPUS}", common.usage()));
            return Ok(None);
        }
        options.common = common;
        ensure!(options.width % 64 == 0, "--width {}: must be a multiple of 64", options.width);
        ensure!(options.dropout < 1.0, "--dropout {}: must be below 1", options.dropout);
        ensure!(options.ema < 1.0, "--ema {}: must be below 1", options.ema);
        Ok(Some(options))
    }

    /// The model, with heads of 64 numbers.
    pub fn model(&self) -> Config {
        let Self { width, layers, length, dropout, recompute, .. } = *self;
        Config { width, layers, heads: width / 64, length, dropout, recompute }
    }

    /// The options that a resumed run must have in common with its first part, because the numbers depend on them. They
    /// do not depend on `--zero` and `--recompute`. Another number of ranks is possible, too; it rounds differently and
    /// draws other numbers for dropout.
    pub fn of_run(&self, text: &Text) -> String {
        let Self { width, layers, length, rows, micro_batches, lr, dropout, ema, .. } = self;
        let crate::Options { amp, steps, seed, .. } = &self.common;
        format!(
            "--amp {} --steps {steps} --seed {seed} --width {width} --layers {layers} --length {length} --rows {rows} \
             --accumulate {micro_batches} --lr {lr} --dropout {dropout} --ema {ema}, and {}",
            amp.name(),
            text.identity()
        )
    }
}

//! The command line.

use super::data::Text;
use super::model::Config;
use super::vocabulary::BYTES;
use crate::options::{Flag, OwnOptions};
use anyhow::{Result, ensure};
use std::ffi::OsString;
use std::path::PathBuf;

/// The options of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Those that all recipes have.
    pub common: crate::Options,
    /// The text; `None`: the sources of tch.
    pub text: Option<PathBuf>,
    /// The number of different tokens; `None`: the bytes.
    pub words: Option<i64>,
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
    pub sample: usize,
}

impl OwnOptions for Options {
    const ABOUT: [&'static str; 2] = [
        "\
Trains a GPT over bytes or words, and writes a report of it.

Usage: gpt [options]
",
        "
A GPU is used if there is one. It should get a larger model and longer texts, such as
  cargo run --release --example gpt -- --text FILE --width 768 --layers 12 --length 1024
    --rows 16 --accumulate 4 --steps 20000 --lr 0.0006 --ema 0.999
If its memory does not suffice, add --recompute, or take fewer --rows, and
--accumulate more of them. On several GPUs, add --ranks N and --zero. On several
computers, start it on each of them by
  torchrun --no-python --nnodes ... -- target/release/examples/gpt --zero ...
where the first -- keeps the options apart from those of torchrun.",
    ];

    const FLAGS: &'static [Flag<Self>] = &[
        ("--text", "the file to learn, default the Rust sources of tch", |it, args| {
            args.path().map(|path| it.text = Some(path))
        }),
        (
            "--words",
            "tokens that are bytes and the most frequent words of the text, such as\n\
             8192; default are bytes",
            |it, args| args.between(257, 1_000_000).map(|count| it.words = Some(count)),
        ),
        ("--width", "of the model, a multiple of 64, default 256", |it, args| {
            args.at_least(64).map(|width| it.width = width)
        }),
        ("--layers", "default 4", |it, args| args.at_least(1).map(|layers| it.layers = layers)),
        ("--length", "tokens of an excerpt, default 128", |it, args| {
            args.at_least(1).map(|length| it.length = length)
        }),
        ("--rows", "excerpts of a micro-batch, on all ranks together, default 8", |it, args| {
            args.at_least(1).map(|rows| it.rows = rows)
        }),
        (
            "--accumulate",
            "micro-batches whose gradients are added up for a step, default 2",
            |it, args| args.between(1, 1_000_000).map(|count| it.micro_batches = count),
        ),
        (
            "--lr",
            "the largest learning rate, after a warm-up of a tenth of the steps,\n\
             from which it falls to a tenth by a cosine, default 0.001",
            |it, args| args.finite().map(|lr| it.lr = lr),
        ),
        ("--dropout", "default 0.1", |it, args| {
            args.between(0.0, 1.0).map(|dropout| it.dropout = dropout)
        }),
        (
            "--ema",
            "the decay of the averaged weights, which are the ones that are\n\
             evaluated and that write the sample, default 0.99",
            |it, args| args.between(0.0, 1.0).map(|ema| it.ema = ema),
        ),
        (
            "--recompute",
            "keep no activations of the blocks, and compute them a second time",
            |it, args| args.turn_on(&mut it.recompute),
        ),
        ("--zero", "divide the state of the optimizer among the ranks (ZeRO-1)", |it, args| {
            args.turn_on(&mut it.zero)
        }),
        ("--sample", "tokens to write at the end, default 300", |it, args| {
            args.between(0, 1_000_000).map(|tokens| it.sample = tokens)
        }),
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
            text: None,
            words: None,
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
            sample: 300,
        }
    }

    /// Parses the arguments; `None` after `--help`, which has printed the usage.
    pub fn parse(args: impl IntoIterator<Item: Into<OsString>>) -> Result<Option<Self>> {
        let options = Self::new(crate::Options::new("gpt", 300)).take(args)?;
        if let Some(Self { width, dropout, ema, .. }) = options {
            ensure!(width % 64 == 0, "--width {width}: must be a multiple of 64");
            ensure!(dropout < 1.0, "--dropout {dropout}: must be below 1");
            ensure!(ema < 1.0, "--ema {ema}: must be below 1");
        }
        Ok(options)
    }

    /// The model, with heads of 64 numbers.
    pub fn model(&self) -> Config {
        let Self { words, width, layers, length, dropout, recompute, .. } = *self;
        let (vocabulary, heads) = (words.unwrap_or(BYTES), width / 64);
        Config { vocabulary, width, layers, heads, length, dropout, recompute, lean: true }
    }

    /// The options that a resumed run must have in common with its first part, because the numbers depend on them. They
    /// do not depend on `--zero` and `--recompute`. Another number of ranks is possible, too; it rounds differently and
    /// draws other numbers for dropout.
    pub fn of_run(&self, text: &Text) -> String {
        let Self { width, layers, length, rows, micro_batches, lr, dropout, ema, .. } = self;
        let crate::Options { steps, seed, .. } = &self.common;
        let amp = self.common.amp_of_run();
        let words = self.words.map(|count| format!(" --words {count}")).unwrap_or_default();
        format!(
            "--amp {amp} --steps {steps} --seed {seed}{words} --width {width} --layers {layers} --length {length} \
             --rows {rows} --accumulate {micro_batches} --lr {lr} --dropout {dropout} --ema {ema}, and {}",
            text.identity()
        )
    }
}

//! The command line.

use super::data::Data;
use super::model::Config;
use anyhow::{Result, ensure};
use std::ffi::OsString;
use std::path::PathBuf;

/// What `--help` prints before the common options.
const USAGE: &str = "\
Trains a BERT that classifies sentences, and writes a report of it.

Usage: text_classifier [options]

  --data         a file with a label, a tab and a sentence on each line, default the
                 doc comments of six crates, which are to be told apart
  --pretrained   a folder with model.safetensors, vocab.txt and config.json of a BERT
                 from Hugging Face, to begin with, default random weights
  --vocabulary   tokens to make from the sentences, default 4000
  --width        of the model, a multiple of 64, default 128
  --layers       default 2
  --length       tokens of a sentence at most, default 48
  --rows         sentences of a batch, on all ranks together, default 32
  --lr           the largest learning rate, after a warm-up of a tenth of the steps,
                 from which it falls linearly to zero, default 0.001
  --dropout      default 0.1
  --eval-every   steps from one evaluation on held-out sentences to the next, default 50
  --save-every   steps from one checkpoint to the next, default 50
  --log-every    steps from one line of the log to the next, default 10
";

/// What `--help` prints at the end.
const GPUS: &str = "
A GPU is used if there is one. It should get a pretrained model, such as
  cargo run --release --example text_classifier -- --data FILE --pretrained DIR
    --length 128 --rows 64 --lr 0.00005 --steps 2000 --eval-every 200
On several GPUs, add --ranks N. On several computers, start it on each of them by
  torchrun --no-python --nnodes ... -- target/release/examples/text_classifier ...
where the first -- keeps the options apart from those of torchrun.";

/// The options of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Those that all recipes have.
    pub common: crate::Options,
    /// The sentences; `None`: doc comments.
    pub data: Option<PathBuf>,
    /// The model to begin with; `None`: random weights.
    pub pretrained: Option<PathBuf>,
    pub vocabulary: usize,
    pub width: i64,
    pub layers: i64,
    pub length: usize,
    pub rows: usize,
    pub lr: f64,
    pub dropout: f64,
    pub eval_every: u64,
    pub save_every: u64,
    pub log_every: u64,
}

impl Options {
    /// The defaults.
    pub fn new(common: crate::Options) -> Self {
        Self {
            common,
            data: None,
            pretrained: None,
            vocabulary: 4000,
            width: 128,
            layers: 2,
            length: 48,
            rows: 32,
            lr: 1e-3,
            dropout: 0.1,
            eval_every: 50,
            save_every: 50,
            log_every: 10,
        }
    }

    /// Parses the arguments; `None` after `--help`, which has printed the usage.
    pub fn parse(args: impl IntoIterator<Item: Into<OsString>>) -> Result<Option<Self>> {
        let mut options = Self::new(crate::Options::new("text_classifier", 300));
        let mut common = options.common.clone();
        let is_run = common.parse(args, |flag, args| {
            match flag {
                "--data" => options.data = Some(args.path()?),
                "--pretrained" => options.pretrained = Some(args.path()?),
                "--vocabulary" => options.vocabulary = args.between(100, 1_000_000)?,
                "--width" => options.width = args.at_least(64)?,
                "--layers" => options.layers = args.at_least(1)?,
                "--length" => options.length = args.between(3, 65_536)?,
                "--rows" => options.rows = args.at_least(1)?,
                "--lr" => options.lr = args.finite()?,
                "--dropout" => options.dropout = args.between(0.0, 1.0)?,
                "--eval-every" => options.eval_every = args.at_least(1)?,
                "--save-every" => options.save_every = args.at_least(1)?,
                "--log-every" => options.log_every = args.at_least(1)?,
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
        Ok(Some(options))
    }

    /// The size of a model with random weights, with heads of 64 numbers.
    pub fn model(&self, vocabulary: usize) -> Config {
        Config {
            vocab_size: vocabulary as i64,
            hidden_size: self.width,
            num_hidden_layers: self.layers,
            num_attention_heads: self.width / 64,
            intermediate_size: self.width.saturating_mul(4),
            max_position_embeddings: self.length as i64,
            type_vocab_size: 1,
            layer_norm_eps: 1e-12,
        }
    }

    /// The options that a resumed run must have in common with its first part, because the numbers depend on them.
    /// Another number of ranks is possible; it rounds differently and draws other numbers for dropout.
    pub fn of_run(&self, data: &Data, config: Config) -> String {
        let Self { length, rows, lr, dropout, eval_every, .. } = self;
        let crate::Options { amp, steps, seed, .. } = &self.common;
        format!(
            "--amp {} --steps {steps} --seed {seed} --length {length} --rows {rows} --lr {lr} --dropout {dropout} \
             --eval-every {eval_every}, {config:?}, and {}",
            amp.name(),
            data.identity()
        )
    }
}

//! The command line.

use super::batch::batches;
use super::data::Data;
use super::lines::Lines;
use super::model::{Config, Dropout, Pooling};
use crate::options::{Flag, OwnOptions, below_target};
use anyhow::{Context, Result, bail, ensure};
use std::ffi::OsString;
use std::path::PathBuf;
use tch::Kind;

/// The options of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Those that all recipes have.
    pub common: crate::Options,
    /// The file of the sentences; `None`: doc comments.
    pub data: Option<PathBuf>,
    /// How many sentences are read of it; `None`: all.
    pub rows_limit: Option<usize>,
    pub remove_blanks: bool,
    /// The names of the labels, if these are numbers; `None`: the numbers.
    pub labels: Option<Vec<String>>,
    /// The share of sentences to learn; `None`: four fifths, and the rest is divided once more.
    pub ratio: Option<f64>,
    /// The model to begin with; `None`: random weights.
    pub pretrained: Option<PathBuf>,
    pub vocabulary: usize,
    pub width: i64,
    pub layers: i64,
    pub pooling: Pooling,
    pub length: usize,
    pub pads_to_length: bool,
    /// The passes over the sentences to learn; `None`: as many as the steps need.
    pub epochs: Option<u64>,
    pub rows: usize,
    /// Sentences of a batch in evaluations; `None`: as many as in training.
    pub dev_rows: Option<usize>,
    /// Whether these numbers are of each rank, and not of all ranks together.
    pub per_rank: bool,
    /// Threads that prepare batches.
    pub workers: usize,
    pub lr: f64,
    /// Whether the learning rate stays as it is.
    pub constant_lr: bool,
    pub weight_decay: f64,
    pub eps: f64,
    /// To which norm gradients are clipped; `None`: they are not.
    pub max_norm: Option<f64>,
    pub dropout: Dropout,
    /// The dtype in which ranks send gradients to each other; `None`: their own.
    pub compress: Option<Kind>,
    /// Whether held-out sentences are not looked at during the training.
    pub no_eval: bool,
    /// Whether their loss is the sum over the batches, and not the mean over the sentences.
    pub sums_loss: bool,
    /// The file for the best weights alone.
    pub weights: Option<PathBuf>,
}

impl OwnOptions for Options {
    const ABOUT: [&'static str; 2] = [
        "\
Trains a BERT that classifies sentences, and writes a report of it.

Usage: text_classifier [options]
",
        "
A GPU is used if there is one. It should get a pretrained model, such as
  cargo run --release --example text_classifier -- --data FILE --pretrained DIR
    --length 128 --rows 64 --lr 0.00005 --steps 2000 --eval-every 200
On several GPUs, add --ranks N. On several computers, start it on each of them by
  torchrun --no-python --nnodes ... -- target/release/examples/text_classifier ...
where the first -- keeps the options apart from those of torchrun.",
    ];

    const FLAGS: &'static [Flag<Self>] = &[
        (
            "--data",
            "a file with a label, a tab and a sentence on each line, or, if its name\n\
             ends in .json or .jsonl, with rows of a sentence and a label, such as\n\
             [\"a sentence\", 2] on each line; default the doc comments of six crates,\n\
             which are to be told apart",
            |it, args| args.path().map(|path| it.data = Some(path)),
        ),
        (
            "--labels",
            "the names of labels that are numbers, from 0 on and separated by commas,\n\
             such as the keys of label2id; default the numbers",
            |it, args| args.parsed(names).map(|names| it.labels = Some(names)),
        ),
        ("--rows-limit", "read no more than the first N sentences, default all", |it, args| {
            args.at_least(1).map(|rows| it.rows_limit = Some(rows))
        }),
        ("--remove-blanks", "of all sentences, for languages that need none", |it, args| {
            args.turn_on(&mut it.remove_blanks)
        }),
        (
            "--ratio",
            "the share of sentences to learn, after they were shuffled as Python's\n\
             random.shuffle does with --seed. On the rest the weights are chosen and\n\
             tested. Default four fifths, and the rest is divided between both",
            |it, args| args.between(0.0, 1.0).map(|ratio| it.ratio = Some(ratio)),
        ),
        (
            "--pretrained",
            "a folder with model.safetensors or pytorch_model.bin, vocab.txt and\n\
             config.json of a BERT from Hugging Face, to begin with, default random\n\
             weights",
            |it, args| args.path().map(|path| it.pretrained = Some(path)),
        ),
        ("--vocabulary", "tokens to make from the sentences, default 4000", |it, args| {
            args.between(100, 1_000_000).map(|size| it.vocabulary = size)
        }),
        ("--width", "of the model, a multiple of 64, default 128", |it, args| {
            args.at_least(64).map(|width| it.width = width)
        }),
        ("--layers", "default 2", |it, args| args.at_least(1).map(|layers| it.layers = layers)),
        (
            "--pooling",
            "what is classified: mean, over the tokens, or first, the first token\n\
             after BERT's pooler, as in BertForSequenceClassification; default mean",
            |it, args| args.parsed(Pooling::parse).map(|pooling| it.pooling = pooling),
        ),
        ("--length", "tokens of a sentence at most, default 48", |it, args| {
            args.between(3, 65_536).map(|length| it.length = length)
        }),
        (
            "--pad",
            "longest or max: to the longest sentence of a batch, which is the\n\
             default, or always to --length",
            |it, args| {
                args.one_of(["longest", "max"]).map(|word| it.pads_to_length = word == "max")
            },
        ),
        (
            "--epochs",
            "passes over the sentences to learn, instead of --steps; the last of both\n\
             counts. Orders and padding are those of PyTorch's DistributedSampler\n\
             with its default seed, and the last batch of an epoch may be smaller",
            |it, args| args.between(1, 1_000_000).map(|epochs| it.epochs = Some(epochs)),
        ),
        ("--steps", "default 300", |it, args| {
            it.epochs = None;
            args.at_least(1).map(|steps| it.common.steps = steps)
        }),
        ("--rows", "sentences of a batch, on all ranks together, default 32", |it, args| {
            args.at_least(1).map(|rows| it.rows = rows)
        }),
        ("--dev-rows", "the same in evaluations, default --rows", |it, args| {
            args.at_least(1).map(|rows| it.dev_rows = Some(rows))
        }),
        ("--per-rank", "--rows and --dev-rows are those of each rank", |it, args| {
            args.turn_on(&mut it.per_rank)
        }),
        (
            "--workers",
            "threads that prepare batches ahead of their use, in the same order;\n\
             default 0: each batch is prepared when it is needed",
            |it, args| args.between(0, 64).map(|workers| it.workers = workers),
        ),
        ("--lr", "the largest learning rate, default 0.001", |it, args| {
            args.finite().map(|lr| it.lr = lr)
        }),
        (
            "--schedule",
            "linear: the learning rate rises in a tenth of the steps and then falls\n\
             to zero, which is the default; or constant",
            |it, args| {
                args.one_of(["linear", "constant"]).map(|word| it.constant_lr = word == "constant")
            },
        ),
        (
            "--weight-decay",
            "of AdamW, for all parameters but biases and layer norms, default 0.01",
            |it, args| args.finite().map(|decay| it.weight_decay = decay),
        ),
        ("--eps", "of AdamW, default 1e-8", |it, args| args.finite().map(|eps| it.eps = eps)),
        (
            "--max-norm",
            "to which the gradients are clipped, default 1; 0 does not clip them",
            |it, args| args.finite().map(|norm| it.max_norm = (norm > 0.0).then_some(norm)),
        ),
        ("--dropout", "of activations, default 0.1", |it, args| {
            args.between(0.0, 1.0).map(|share| it.dropout.hidden = share)
        }),
        ("--attention-dropout", "of attention weights, default 0", |it, args| {
            args.between(0.0, 1.0).map(|share| it.dropout.attention = share)
        }),
        (
            "--compress",
            "off, fp16 or bf16: what ranks send gradients in, which halves the\n\
             traffic; default off, which is f32",
            |it, args| args.parsed(compression).map(|kind| it.compress = kind),
        ),
        (
            "--no-eval",
            "do not evaluate during the training, and keep the last weights",
            |it, args| args.turn_on(&mut it.no_eval),
        ),
        (
            "--dev-loss",
            "mean or sum: the loss on held-out sentences is the mean over the\n\
             sentences, which is the default, or the sum of the means of the batches",
            |it, args| args.one_of(["mean", "sum"]).map(|word| it.sums_loss = word == "sum"),
        ),
        (
            "--weights",
            "also save the best weights alone, for torch.load of Python in .pt, .pth\n\
             and .bin, or as .safetensors, under the names of\n\
             BertForSequenceClassification; with --no-eval the last ones",
            |it, args| args.parsed(weights).map(|path| it.weights = Some(path)),
        ),
        (
            "--published-settings",
            "the settings of a BERT trainer in PyTorch: see docs/recipes.md.\n\
             Options after it change them",
            |it, _| {
                it.publish();
                Ok(())
            },
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
            labels: None,
            rows_limit: None,
            remove_blanks: false,
            ratio: None,
            pretrained: None,
            vocabulary: 4000,
            width: 128,
            layers: 2,
            pooling: Pooling::Mean,
            length: 48,
            pads_to_length: false,
            epochs: None,
            rows: 32,
            dev_rows: None,
            per_rank: false,
            workers: 0,
            lr: 1e-3,
            constant_lr: false,
            weight_decay: 0.01,
            eps: 1e-8,
            max_norm: Some(1.0),
            dropout: Dropout { hidden: 0.1, attention: 0.0 },
            compress: None,
            no_eval: false,
            sums_loss: false,
            weights: None,
        }
    }

    /// Parses the arguments; `None` after `--help`, which has printed the usage.
    pub fn parse(args: impl IntoIterator<Item: Into<OsString>>) -> Result<Option<Self>> {
        let options = Self::new(crate::Options::new("text_classifier", 300)).take(args)?;
        if let Some(Self { width, dropout, ratio, .. }) = options {
            let Dropout { hidden, attention } = dropout;
            ensure!(width % 64 == 0, "--width {width}: must be a multiple of 64");
            ensure!(hidden < 1.0, "--dropout {hidden}: must be below 1");
            ensure!(attention < 1.0, "--attention-dropout {attention}: must be below 1");
            ensure!(ratio.is_none_or(|ratio| ratio < 1.0), "--ratio: must be below 1");
        }
        Ok(options)
    }

    /// Sets what the published trainer has, which docs/recipes.md describes.
    fn publish(&mut self) {
        let common =
            crate::Options { seed: 123, log_every: 1, eval_every: 50, ..self.common.clone() };
        *self = Self {
            common,
            rows_limit: Some(10_000),
            remove_blanks: true,
            ratio: Some(0.92),
            pooling: Pooling::First,
            length: 128,
            pads_to_length: true,
            epochs: Some(1),
            rows: 32,
            dev_rows: Some(32),
            per_rank: true,
            workers: 2,
            lr: 3e-5,
            constant_lr: true,
            weight_decay: 0.01,
            eps: 1e-6,
            max_norm: None,
            dropout: Dropout { hidden: 0.1, attention: 0.1 },
            sums_loss: true,
            weights: Some(below_target("text_classifier-weights.pt")),
            ..self.clone()
        };
    }

    /// The same options for so many ranks and sentences to learn, in rows of all ranks and in steps. Fails if the ranks
    /// cannot have equally many rows.
    pub fn resolved(self, ranks: usize, sentences: usize) -> Result<Self> {
        let ranks_of = |rows: usize| if self.per_rank { rows.saturating_mul(ranks) } else { rows };
        let (rows, dev_rows) = (ranks_of(self.rows), ranks_of(self.dev_rows.unwrap_or(self.rows)));
        for (option, rows) in [("--rows", rows), ("--dev-rows", dev_rows)] {
            ensure!(
                rows.is_multiple_of(ranks),
                "{option} {rows} cannot be divided among {ranks} ranks"
            );
        }
        let mut common = self.common.clone();
        if let Some(epochs) = self.epochs {
            common.length = "--epochs";
            common.steps = epochs.saturating_mul(batches(sentences, rows, ranks));
        }
        Ok(Self { common, rows, dev_rows: Some(dev_rows), per_rank: false, ..self })
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

    /// Reads and divides the sentences that are wanted.
    pub fn sentences(&self) -> Result<Data> {
        let mut lines = match &self.data {
            Some(path) => Lines::read(path)?,
            None => Lines::of_crates()?,
        };
        lines.all.truncate(self.rows_limit.unwrap_or(usize::MAX));
        if self.remove_blanks {
            lines
                .all
                .iter_mut()
                .for_each(|(_, text)| *text = text.replace(' ', "").trim().to_owned());
        }
        let mut data = match self.ratio {
            Some(ratio) => lines.divided_in_two(ratio, self.common.seed)?,
            None => lines.divided_in_three()?,
        };
        if let Some(names) = &self.labels {
            data.name_labels(names).context("--labels")?;
        }
        Ok(data)
    }

    /// The options that a resumed run must have in common with its first part, because the numbers depend on them.
    /// Another number of ranks is possible; it rounds differently and draws other numbers for dropout.
    pub fn of_run(&self, data: &Data, config: Config) -> String {
        let Self { lr, weight_decay, eps, max_norm, rows, length, pooling, .. } = self;
        let Dropout { hidden, attention } = self.dropout;
        let crate::Options { steps, seed, eval_every, .. } = &self.common;
        let amp = self.common.amp_of_run();
        let word = |is: bool, words: [&'static str; 2]| words[usize::from(is)];
        format!(
            "--amp {amp} {} {steps} --seed {seed} --pooling {} --length {length} --pad {} --rows {rows} --lr {lr} \
             --schedule {} --weight-decay {weight_decay} --eps {eps} --max-norm {} --dropout {hidden} \
             --attention-dropout {attention} --compress {:?} --eval-every {eval_every}{}, {config:?}, and {}",
            self.common.length,
            pooling.name(),
            word(self.pads_to_length, ["longest", "max"]),
            word(self.constant_lr, ["linear", "constant"]),
            max_norm.unwrap_or(0.0),
            self.compress,
            word(self.no_eval, ["", " --no-eval"]),
            data.identity()
        )
    }
}

/// The value of `--compress`.
fn compression(name: &str) -> Result<Option<Kind>> {
    match name {
        "off" => Ok(None),
        "fp16" => Ok(Some(Kind::Half)),
        "bf16" => Ok(Some(Kind::BFloat16)),
        _ => bail!("is off, fp16 or bf16"),
    }
}

/// The value of `--labels`.
fn names(text: &str) -> Result<Vec<String>> {
    let names: Vec<_> = text.split(',').map(|name| name.trim().to_owned()).collect();
    ensure!(names.iter().all(|name| !name.is_empty()), "a name is empty");
    Ok(names)
}

/// The value of `--weights`, whose name says the format.
fn weights(name: &str) -> Result<PathBuf> {
    let path = PathBuf::from(name);
    let extension = path.extension().and_then(|extension| extension.to_str());
    let is_known = matches!(extension, Some("pt" | "pth" | "bin" | "safetensors"));
    ensure!(is_known, "the name ends in .pt, .pth, .bin or .safetensors");
    Ok(path)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    fn parse(line: &str) -> Result<Options> {
        Ok(Options::parse(line.split_whitespace().map(str::to_owned))?.unwrap())
    }

    #[test]
    fn options_after_the_published_settings_change_them() {
        let published = parse("--published-settings").unwrap();
        assert_eq!((published.lr, published.length, published.common.seed), (3e-5, 128, 123));
        let changed = parse("--published-settings --lr 0.5 --pooling mean --steps 7").unwrap();
        assert_eq!((changed.lr, changed.pooling, changed.epochs), (0.5, Pooling::Mean, None));
        assert_eq!((changed.common.steps, changed.length), (7, 128));
        assert_eq!(parse("--lr 0.5 --published-settings").unwrap(), published);
    }

    /// The options that docs/recipes.md has beside the lines of the published program.
    #[test]
    fn the_published_settings_are_those_of_the_page_and_no_others() {
        let weights = below_target("text_classifier-weights.pt");
        let weights = weights.to_str().unwrap();
        let line = "--rows-limit 10000 --remove-blanks --seed 123 --ratio 0.92 --length 128 --pad max --pooling first \
                    --dropout 0.1 --attention-dropout 0.1 --lr 0.00003 --weight-decay 0.01 --eps 1e-6 \
                    --schedule constant --max-norm 0 --epochs 1 --rows 32 --dev-rows 32 --per-rank --workers 2 \
                    --log-every 1 --eval-every 50 --dev-loss sum";
        let published = parse("--published-settings").unwrap();
        assert_eq!(parse(&format!("{line} --weights {weights}")).unwrap(), published);
    }

    #[test]
    fn an_epoch_on_ranks_has_their_rows_and_steps() {
        let resolved =
            |line: &str, ranks, sentences| parse(line).unwrap().resolved(ranks, sentences).unwrap();
        // Of 9200 sentences to learn, one GPU takes 288 steps and two take 144.
        for (ranks, steps) in [(1, 288), (2, 144)] {
            let options = resolved("--published-settings", ranks, 9200);
            assert_eq!((options.rows, options.dev_rows), (32 * ranks, Some(32 * ranks)));
            assert_eq!((options.common.steps, options.common.length), (steps, "--epochs"));
            assert_eq!(options.clone().resolved(ranks, 9200).unwrap(), options);
        }
        let plain = resolved("--rows 6 --dev-rows 4", 2, 9200);
        assert_eq!((plain.rows, plain.dev_rows, plain.common.steps), (6, Some(4), 300));
        for line in ["--rows 5", "--dev-rows 5"] {
            let error = parse(line).unwrap().resolved(2, 9200).unwrap_err().to_string();
            assert!(error.contains(line), "{error}");
        }
    }

    #[test]
    fn names_of_labels_are_separated_by_commas() {
        let labels = parse("--labels joy,anger").unwrap().labels;
        assert_eq!(labels, Some(vec!["joy".to_owned(), "anger".to_owned()]));
    }

    #[test]
    fn a_bad_value_is_refused() {
        for line in [
            "--ratio 1",
            "--pooling last",
            "--pad 3",
            "--schedule cosine",
            "--compress fp8",
            "--dev-loss median",
            "--weights best.onnx",
            "--labels joy,,anger",
            "--workers 65",
            "--attention-dropout 1",
        ] {
            let error = format!("{:#}", parse(line).unwrap_err());
            assert!(error.contains(line.split(' ').next().unwrap()), "{line}: {error}");
        }
    }
}

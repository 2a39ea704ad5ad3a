//! The options that the recipes have in common, and how all options are read.

use super::{Ranks, print, tell, writable};
use anyhow::{Context, Result, bail, ensure};
use lexopt::{Arg, Parser};
use std::ffi::OsString;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use tch::{Cuda, Device};
use tch_amp::Amp;
use tch_amp::checkpoint::{Checkpoint, CheckpointFolder};

/// The part with the precision of the run.
pub const AMP: &str = "amp";

/// An option: its name, what `--help` says of it, and what takes it, with its value from [`Arguments`].
pub type Flag<T> = (&'static str, &'static str, fn(&mut T, &mut Arguments<'_>) -> Result<()>);

/// The common options. In what `--help` says, words in capitals stand for the defaults of the recipe.
const COMMON: &[Flag<Options>] = &[
    (
        "--amp",
        "off, bf16, fp16, or auto for what is fastest, which some recipes\n\
         measure for each operator of the model; default bf16",
        |it, args| args.value().map(|amp| it.amp = amp),
    ),
    ("--device", "cpu or cuda, default CUDA if it is usable", |it, args| {
        args.parsed(parse_device).map(|device| it.device = Some(device))
    }),
    ("--steps", "default STEPS", |it, args| args.at_least(1).map(|steps| it.steps = steps)),
    ("--seed", "initial weights and order of the data, default 0", |it, args| {
        args.value().map(|seed| it.seed = seed)
    }),
    (
        "--ranks",
        "train on N processes of this computer, each on a GPU of its own if\n\
         there are GPUs; on several computers, start the program by torchrun",
        |it, args| args.between(1, MOST_RANKS).map(|ranks| it.ranks = Some(ranks)),
    ),
    (
        "--eval-every",
        "steps from one evaluation on held-out data to the next, default EVAL",
        |it, args| args.at_least(1).map(|every| it.eval_every = every),
    ),
    ("--save-every", "steps from one checkpoint to the next, default SAVE", |it, args| {
        args.at_least(1).map(|every| it.save_every = every)
    }),
    ("--log-every", "steps from one line of the log to the next, default LOG", |it, args| {
        args.at_least(1).map(|every| it.log_every = every)
    }),
    (
        "--checkpoints",
        "the folder for the checkpoints, which must have none of another run,\n\
         default target/NAME-checkpoints",
        |it, args| args.path().map(|path| it.checkpoints = Some(path)),
    ),
    (
        "--resume",
        "go on from the newest checkpoint, with the same numbers as a run that\n\
         was never interrupted",
        |it, args| args.turn_on(&mut it.resume),
    ),
    (
        "--logs",
        "the folder for log.csv and for TensorBoard, default target/NAME-logs",
        |it, args| args.path().map(|path| it.logs = Some(path)),
    ),
    ("--out", "the HTML report, default target/NAME-report.html", |it, args| {
        args.path().map(|path| it.out = Some(path))
    }),
];

/// The most processes that can be started on a computer.
const MOST_RANKS: usize = 64;

/// What can be trained in, in the order in which it is compared.
pub const PRECISIONS: [Amp; 3] = [Amp::Off, Amp::Bf16, Amp::Fp16];

/// The name of a precision in tables, plots and style sheets.
pub fn precision_name(amp: Amp) -> &'static str {
    match amp {
        Amp::Off => "fp32",
        Amp::Bf16 => "bf16",
        Amp::Fp16 => "fp16",
        Amp::Auto => "auto",
    }
}

/// The common options of a recipe.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// The name of the recipe, from which the default paths are made.
    pub name: &'static str,
    /// The option that says how long the run is.
    pub length: &'static str,
    /// Whether a run without `--resume` takes the place of an earlier one with the same options.
    pub replaces: bool,
    /// The precision of the training.
    pub amp: Amp,
    /// Whether to measure in which dtype each operator is fastest, unless all are in f32: with `--amp auto`.
    pub wants_plan: bool,
    /// `None`: CUDA if it is usable, otherwise the CPU.
    pub device: Option<Device>,
    /// The number of steps of the whole run.
    pub steps: u64,
    /// Determines the initial weights and the order of the data.
    pub seed: i64,
    /// The number of processes that train together; `None`: this one alone.
    pub ranks: Option<usize>,
    /// Steps from one evaluation to the next.
    pub eval_every: u64,
    /// Steps from one checkpoint to the next.
    pub save_every: u64,
    /// Steps from one line of the log to the next.
    pub log_every: u64,
    /// The folder of the checkpoints; `None`: none are saved.
    pub checkpoints: Option<PathBuf>,
    /// Whether to go on from the newest checkpoint.
    pub resume: bool,
    /// The folder of the logs; `None`: none are written.
    pub logs: Option<PathBuf>,
    /// The path of the report; `None`: none is written.
    pub out: Option<PathBuf>,
}

impl Options {
    /// The defaults of a recipe, which writes no files: for tests.
    pub fn silent(name: &'static str, steps: u64) -> Self {
        Self {
            name,
            length: "--steps",
            replaces: false,
            amp: Amp::Bf16,
            wants_plan: false,
            device: None,
            steps,
            seed: 0,
            ranks: None,
            eval_every: 50,
            save_every: 50,
            log_every: 10,
            checkpoints: None,
            resume: false,
            logs: None,
            out: None,
        }
    }

    /// The defaults of a recipe, which writes to `target/` of a checkout, otherwise to the current folder.
    pub fn new(name: &'static str, steps: u64) -> Self {
        Self {
            checkpoints: Some(below_target(&format!("{name}-checkpoints"))),
            logs: Some(below_target(&format!("{name}-logs"))),
            out: Some(below_target(&format!("{name}-report.html"))),
            ..Self::silent(name, steps)
        }
    }

    /// Fails if the report could not be written at the end. Changes nothing that is there. All ranks call this.
    pub fn check_out(&self, ranks: &Ranks) -> Result<()> {
        let check = || self.out.as_deref().map_or(Ok(()), writable::check_file);
        ranks.on_first(|| check().context("--out"))?;
        Ok(())
    }

    /// Returns the newest checkpoint that is not damaged, on all ranks, if the run is to be resumed and there is one.
    pub fn newest(&self, ranks: &Ranks) -> Result<Option<Checkpoint>> {
        let path = self.checkpoints.as_deref().filter(|path| self.resume && path.exists());
        ranks.load_on_first(|| {
            let Some(path) = path else { return Ok(None) };
            let found = CheckpointFolder::new(path)?.latest()?;
            Ok(found.map(|found| {
                for damaged in &found.damaged {
                    tell(format_args!(
                        "{damaged}. The run goes on from {} instead.",
                        found.file.path.display()
                    ));
                }
                found.checkpoint
            }))
        })
    }

    /// The device to train on; on several ranks, see [`Ranks::device`](super::Ranks::device).
    pub fn device(&self) -> Result<Device> {
        match self.device {
            Some(Device::Cuda(_)) if !cuda_is_usable() => bail!("CUDA is not usable here"),
            Some(device) => Ok(device),
            None if cuda_is_usable() => Ok(Device::Cuda(0)),
            None => Ok(Device::Cpu),
        }
    }

    /// Decides what `--amp auto` stands for on this device: the precision of the run that is resumed, or what is
    /// fastest on the first rank, which says why, with a plan for the operators of the model. All ranks call this, and
    /// must have the same `--amp`.
    pub fn decide(&mut self, device: Device, ranks: &Ranks) -> Result<()> {
        let mut amp = self.amp.on(device)?;
        if self.amp == Amp::Auto {
            if let Some(checkpoint) = self.newest(ranks)?
                && checkpoint.contains(AMP)
            {
                checkpoint.restore().add(AMP, &mut amp).apply()?;
            }
            self.wants_plan = true;
        }
        ranks.agree(&mut amp)?;
        if self.amp == Amp::Auto && ranks.is_first() {
            tell(&amp);
        }
        self.amp = amp.amp();
        Ok(())
    }

    /// Whether the training has a plan.
    pub fn has_plan(&self) -> bool {
        self.wants_plan && self.amp != Amp::Off
    }

    /// The precision on which the numbers of a run depend: with the plan that a tuned run has, or without.
    pub fn amp_of_run(&self) -> String {
        format!("{}{}", self.amp, if self.has_plan() { ", chosen by auto" } else { "" })
    }

    /// Puts the defaults of this recipe into what `--help` says.
    fn with_defaults(&self, help: &str) -> String {
        let defaults = [
            ("NAME", self.name.to_owned()),
            ("STEPS", self.steps.to_string()),
            ("EVAL", self.eval_every.to_string()),
            ("SAVE", self.save_every.to_string()),
            ("LOG", self.log_every.to_string()),
        ];
        defaults.iter().fold(help.to_owned(), |help, (word, default)| help.replace(word, default))
    }
}

/// All options of a recipe: the common ones and its own.
pub trait OwnOptions: Sized + 'static {
    /// What `--help` says before the options and after them.
    const ABOUT: [&'static str; 2];

    /// The recipe's own options. One that has the name of a common one takes its place.
    const FLAGS: &'static [Flag<Self>];

    /// The common options.
    fn common(&mut self) -> &mut Options;

    /// Takes the arguments; `None` after `--help`, which has printed the usage.
    fn take(mut self, args: impl IntoIterator<Item: Into<OsString>>) -> Result<Option<Self>> {
        let usage = self.usage();
        let is_run =
            parse(args, |name, args| match (find(Self::FLAGS, name), find(COMMON, name)) {
                (Some((.., take)), _) => take(&mut self, args),
                (None, Some((.., take))) => take(self.common(), args),
                (None, None) => {
                    let own = Self::FLAGS.iter().map(|flag| flag.0);
                    let known = own.chain(COMMON.iter().map(|flag| flag.0));
                    bail!("{} --help lists the options", unknown(name, known))
                }
            })?;
        if !is_run {
            print(usage);
            return Ok(None);
        }
        Ok(Some(self))
    }

    /// What `--help` prints.
    fn usage(&mut self) -> String {
        let [before, after] = Self::ABOUT;
        let own: String = Self::FLAGS.iter().map(help).collect();
        let common = COMMON.iter().filter(|flag| find(Self::FLAGS, flag.0).is_none());
        let common = self.common().with_defaults(&common.map(help).collect::<String>());
        format!("{before}\n{own}{common}\n{INTERRUPTED}\n{after}")
    }
}

/// Returns the message for an unknown argument, with the nearest known option.
pub fn unknown<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let distances = known.into_iter().map(|known| (strsim::osa_distance(name, known), known));
    match distances.min() {
        Some((distance, nearest)) if 3 * distance <= nearest.len() => {
            format!("unknown argument {name}, did you mean {nearest}?")
        }
        _ => format!("unknown argument {name}:"),
    }
}

/// What `--help` says after all options.
const INTERRUPTED: &str =
    "Ctrl-C saves a checkpoint and ends the run; a second Ctrl-C ends it at once.";

/// The lines of `--help` on an option.
fn help<T>((name, text, _): &Flag<T>) -> String {
    format!("  {name:<14} {}\n", text.replace('\n', &format!("\n{:17}", "")))
}

/// The option with this name.
fn find<T>(flags: &'static [Flag<T>], name: &str) -> Option<&'static Flag<T>> {
    flags.iter().find(|flag| flag.0 == name)
}

/// Whether there is a GPU that autocast can use.
pub fn cuda_is_usable() -> bool {
    Cuda::is_available() && tch_amp::autocast::is_autocast_available(Device::Cuda(0))
}

/// Returns a path in `target/` of a checkout, otherwise in the current folder.
pub fn below_target(name: &str) -> PathBuf {
    let bundled = std::env::var_os("TCH_AMP_ROOT").is_some();
    let folder = if !bundled && Path::new("target").is_dir() { "target" } else { "" };
    Path::new(folder).join(name)
}

/// The value of `--device`.
pub fn parse_device(name: &str) -> Result<Device> {
    match name {
        "cpu" => Ok(Device::Cpu),
        "cuda" => Ok(Device::Cuda(0)),
        _ => bail!("the device is cpu or cuda"),
    }
}

/// Calls `take` for each option, such as `--steps`, until all are taken; returns `false` if one asks for help.
pub fn parse(
    args: impl IntoIterator<Item: Into<OsString>>,
    mut take: impl FnMut(&str, &mut Arguments<'_>) -> Result<()>,
) -> Result<bool> {
    let mut parser = Parser::from_args(args);
    while let Some(arg) = parser.next()? {
        let flag = match arg {
            Arg::Long("help") | Arg::Short('h') => return Ok(false),
            Arg::Long(name) => format!("--{name}"),
            Arg::Short(letter) => format!("-{letter}"),
            Arg::Value(text) => text.display().to_string(),
        };
        take(&flag, &mut Arguments { flag: &flag, parser: &mut parser })?;
    }
    Ok(true)
}

/// The arguments after an option, the first of which may be its value.
pub struct Arguments<'a> {
    flag: &'a str,
    parser: &'a mut Parser,
}

impl Arguments<'_> {
    /// Turns on what the option stands for, which has no value.
    pub fn turn_on(&mut self, what: &mut bool) -> Result<()> {
        *what = true;
        Ok(())
    }

    /// Takes the value of the option, which is a path.
    pub fn path(&mut self) -> Result<PathBuf> {
        let value = self.parser.value();
        Ok(value.with_context(|| format!("{} needs a value", self.flag))?.into())
    }

    /// Takes the value of the option, which must be one of these words.
    pub fn one_of<const N: usize>(&mut self, words: [&'static str; N]) -> Result<&'static str> {
        let parse = |text: &str| words.into_iter().find(|word| *word == text);
        self.parsed(|text| parse(text).with_context(|| format!("must be {}", words.join(" or "))))
    }

    /// Takes the value of the option.
    pub fn value<T: FromStr<Err: Into<anyhow::Error>>>(&mut self) -> Result<T> {
        self.parsed(|text| text.parse().map_err(Into::into))
    }

    /// Takes the value of the option, which must not be smaller than `least`.
    pub fn at_least<T>(&mut self, least: T) -> Result<T>
    where
        T: FromStr<Err: Into<anyhow::Error>> + PartialOrd + Display,
    {
        self.parsed(|text| {
            let value: T = text.parse().map_err(Into::into)?;
            ensure!(value >= least, "must be at least {least}");
            Ok(value)
        })
    }

    /// Takes the value of the option, which must be within these limits. NaN is not.
    pub fn between<T>(&mut self, least: T, most: T) -> Result<T>
    where
        T: FromStr<Err: Into<anyhow::Error>> + PartialOrd + Display,
    {
        self.parsed(|text| {
            let value: T = text.parse().map_err(Into::into)?;
            ensure!((&least..=&most).contains(&&value), "must be from {least} to {most}");
            Ok(value)
        })
    }

    /// Takes the value of the option, which must be a finite number that is not negative.
    pub fn finite(&mut self) -> Result<f64> {
        self.parsed(|text| {
            let value: f64 = text.parse()?;
            ensure!(value.is_finite() && value >= 0.0, "must be a finite number from 0 on");
            Ok(value)
        })
    }

    /// Takes the value of the option and parses it; an error names both.
    pub fn parsed<T>(&mut self, parse: impl FnOnce(&str) -> Result<T>) -> Result<T> {
        let (flag, value) = (self.flag, self.path()?);
        let text = value.display().to_string();
        let is_text = value.to_str().context("not in UTF-8");
        is_text.and_then(parse).with_context(|| format!("{flag} {text}"))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    /// The options of a recipe with a width.
    #[derive(Debug, PartialEq)]
    struct Wide(Options, u32);

    impl OwnOptions for Wide {
        const ABOUT: [&'static str; 2] = ["Trains.\n", ""];
        const FLAGS: &'static [Flag<Self>] = &[
            ("--width", "of the model", |it, args| args.at_least(1).map(|width| it.1 = width)),
            ("--logs", "is refused", |_, _| bail!("--logs: not here")),
        ];

        fn common(&mut self) -> &mut Options {
            &mut self.0
        }
    }

    fn parse(line: &str) -> Result<Option<Wide>> {
        let wide = Wide(Options::new("it", 12), 1);
        wide.take(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn every_option_sets_its_field() {
        let want = Options {
            name: "it",
            length: "--steps",
            replaces: false,
            wants_plan: false,
            amp: Amp::Fp16,
            device: Some(Device::Cpu),
            steps: 3,
            seed: -7,
            ranks: Some(2),
            eval_every: 4,
            save_every: 5,
            log_every: 6,
            checkpoints: Some("saved".into()),
            resume: true,
            logs: Options::new("it", 12).logs,
            out: Some("a.html".into()),
        };
        let line = "--amp fp16 --device cpu --steps 3 --resume --seed -7 --out a.html --width 8 --checkpoints saved \
                    --ranks 2 --eval-every 4 --save-every 5 --log-every 6";
        assert_eq!(parse(line).unwrap(), Some(Wide(want, 8)));
        assert_eq!(parse("").unwrap(), Some(Wide(Options::new("it", 12), 1)));
        assert_eq!(parse("--steps=3 --seed=-7").unwrap(), parse("--steps 3 --seed -7").unwrap());
        assert_eq!(parse("--steps 3 --help").unwrap(), None);
    }

    #[test]
    fn a_bad_option_is_named() {
        for line in [
            "--step 3",
            "--steps",
            "--steps 0",
            "--steps x",
            "--device tpu",
            "--ranks 0",
            "--ranks 65",
            "--ranks 18446744073709551615",
            "--amp fp8",
            "--log-every 0",
            "--width 0",
            "--logs here",
            "--resume=yes",
        ] {
            let error = format!("{:#}", parse(line).unwrap_err());
            let flag = line.split([' ', '=']).next().unwrap();
            assert!(error.contains(flag), "{line}: {error}");
        }
    }

    #[test]
    fn a_misspelled_option_is_refused_with_the_nearest_one() {
        for (line, said) in [
            ("--step 3", "unknown argument --step, did you mean --steps? --help lists the options"),
            (
                "--widht 3",
                "unknown argument --widht, did you mean --width? --help lists the options",
            ),
            (
                "--log_every 3",
                "unknown argument --log_every, did you mean --log-every? --help lists the options",
            ),
            ("--momentum 3", "unknown argument --momentum: --help lists the options"),
        ] {
            assert_eq!(parse(line).unwrap_err().to_string(), said);
        }
    }

    #[test]
    fn the_usage_has_every_option_once_with_its_defaults() {
        let usage = Wide(Options::new("it", 12), 1).usage();
        for text in ["default 12", "default 50", "default 10", "target/it-report.html"] {
            assert!(usage.contains(text), "{text}");
        }
        for (name, ..) in COMMON {
            assert_eq!(usage.matches(&format!("\n  {name} ")).count(), 1, "{name}: {usage}");
        }
        assert!(
            usage.contains("--logs         is refused") && !usage.contains("TensorBoard"),
            "{usage}"
        );
        let (options, _) = usage.rsplit_once("\n\n").unwrap();
        assert!(options.lines().skip(2).all(|line| line.starts_with("  ")), "{usage}");
    }
}

//! The options that the recipes have in common.

use super::{Precision, Ranks, writable};
use anyhow::{Context, Result, bail, ensure};
use lexopt::{Arg, Parser};
use std::ffi::OsString;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use tch::{Cuda, Device};

/// What `--help` says of the common options.
pub const USAGE: &str = "  --amp          off, bf16 or fp16, default bf16
  --device       cpu or cuda, default CUDA if it is usable
  --steps        default STEPS
  --seed         initial weights and order of the data, default 0
  --ranks        train on N processes of this computer, each on a GPU of its own if
                 there are GPUs; on several computers, start the program by torchrun
  --checkpoints  the folder for the checkpoints, which must have none of another run,
                 default target/NAME-checkpoints
  --resume       go on from the newest checkpoint, with the same numbers as a run that
                 was never interrupted
  --logs         the folder for log.csv and for TensorBoard, default target/NAME-logs
  --out          the HTML report, default target/NAME-report.html

Ctrl-C saves a checkpoint and ends the run; a second Ctrl-C ends it at once.";

/// The most processes that can be started on a computer.
const MOST_RANKS: usize = 64;

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
    pub amp: Precision,
    /// `None`: CUDA if it is usable, otherwise the CPU.
    pub device: Option<Device>,
    /// The number of steps of the whole run.
    pub steps: u64,
    /// Determines the initial weights and the order of the data.
    pub seed: i64,
    /// The number of processes that train together; `None`: this one alone.
    pub ranks: Option<usize>,
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
            amp: Precision::Bf16,
            device: None,
            steps,
            seed: 0,
            ranks: None,
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

    /// Parses the arguments; `false` if they ask for help. `own` takes the options of the recipe's own, whose value it
    /// gets from [`Arguments::value`], and returns `false` for one that it does not know.
    pub fn parse(
        &mut self,
        args: impl IntoIterator<Item: Into<OsString>>,
        mut own: impl FnMut(&str, &mut Arguments<'_>) -> Result<bool>,
    ) -> Result<bool> {
        parse(args, |flag, args| {
            let is_known = own(flag, args)? || self.take(flag, args)?;
            ensure!(is_known, "unknown argument {flag}: --help lists the options");
            Ok(())
        })
    }

    /// What `--help` says of the common options, with the defaults of this recipe.
    pub fn usage(&self) -> String {
        USAGE.replace("NAME", self.name).replace("STEPS", &self.steps.to_string())
    }

    fn take(&mut self, flag: &str, args: &mut Arguments<'_>) -> Result<bool> {
        match flag {
            "--amp" => self.amp = args.parsed(Precision::parse)?,
            "--device" => self.device = Some(args.parsed(parse_device)?),
            "--steps" => self.steps = args.at_least(1)?,
            "--seed" => self.seed = args.value()?,
            "--ranks" => self.ranks = Some(args.between(1, MOST_RANKS)?),
            "--checkpoints" => self.checkpoints = Some(args.path()?),
            "--resume" => self.resume = true,
            "--logs" => self.logs = Some(args.path()?),
            "--out" => self.out = Some(args.path()?),
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Fails if the report could not be written at the end. Changes nothing that is there. All ranks call this.
    pub fn check_out(&self, ranks: &Ranks) -> Result<()> {
        let check = || self.out.as_deref().map_or(Ok(()), writable::check_file);
        ranks.on_first(|| check().context("--out"))?;
        Ok(())
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
    /// Takes the value of the option, which is a path.
    pub fn path(&mut self) -> Result<PathBuf> {
        let value = self.parser.value();
        Ok(value.with_context(|| format!("{} needs a value", self.flag))?.into())
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

    fn parse(line: &str) -> Result<Option<(Options, u32)>> {
        let (mut options, mut width) = (Options::new("it", 10), 1);
        let asked = options.parse(line.split_whitespace().map(str::to_owned), |flag, args| {
            let is_own = flag == "--width";
            if is_own {
                width = args.at_least(1)?;
            }
            Ok(is_own)
        })?;
        Ok(asked.then_some((options, width)))
    }

    #[test]
    fn every_option_sets_its_field() {
        let want = Options {
            name: "it",
            length: "--steps",
            replaces: false,
            amp: Precision::Fp16,
            device: Some(Device::Cpu),
            steps: 3,
            seed: -7,
            ranks: Some(2),
            checkpoints: Some("saved".into()),
            resume: true,
            logs: Some("logs".into()),
            out: Some("a.html".into()),
        };
        let line = "--amp fp16 --device cpu --steps 3 --resume --seed -7 --out a.html --width 8 \
                    --checkpoints saved --ranks 2 --logs logs";
        assert_eq!(parse(line).unwrap(), Some((want, 8)));
        assert_eq!(parse("").unwrap(), Some((Options::new("it", 10), 1)));
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
            "--width 0",
            "--resume=yes",
        ] {
            let error = format!("{:#}", parse(line).unwrap_err());
            let flag = line.split([' ', '=']).next().unwrap();
            assert!(error.contains(flag), "{line}: {error}");
        }
    }

    #[test]
    fn the_usage_names_every_option_with_its_defaults() {
        let usage = Options::new("it", 10).usage();
        for text in ["default 10", "target/it-logs", "--amp", "--device", "--seed", "--ranks"] {
            assert!(usage.contains(text), "{text}");
        }
        let (options, _) = usage.split_once("\n\n").unwrap();
        assert!(options.lines().all(|line| line.starts_with("  ")), "{usage}");
    }
}

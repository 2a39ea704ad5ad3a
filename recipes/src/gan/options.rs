//! The command line.

use anyhow::{Result, bail};
use std::ffi::OsString;

/// What `--help` prints before the common options.
const USAGE: &str = "\
Trains a generator and a discriminator on eight Gaussians on a ring, and writes a
report of it.

Usage: gan [options]

  --save-every   steps from one checkpoint to the next, default 500
  --log-every    steps from one line of the log to the next, default 100
";

/// What `--help` prints at the end.
const GPUS: &str = "
A GPU is used if there is one. Networks this small are not faster there, nor in half
precision; with --amp fp16 each loss has a scale of its own.";

/// The options of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Those that all recipes have.
    pub common: crate::Options,
    pub save_every: u64,
    pub log_every: u64,
}

impl Options {
    /// The defaults.
    pub fn new(common: crate::Options) -> Self {
        Self { common, save_every: 500, log_every: 100 }
    }

    /// Parses the arguments; `None` after `--help`, which has printed the usage.
    pub fn parse(args: impl IntoIterator<Item: Into<OsString>>) -> Result<Option<Self>> {
        let mut options = Self::new(crate::Options::new("gan", 3000));
        let mut common = options.common.clone();
        let is_run = common.parse(args, |flag, args| {
            match flag {
                "--save-every" => options.save_every = args.at_least(1)?,
                "--log-every" => options.log_every = args.at_least(1)?,
                "--ranks" => bail!("networks this small train in one process; `gpt` has --ranks"),
                _ => return Ok(false),
            }
            Ok(true)
        })?;
        if !is_run {
            crate::print(format_args!("{USAGE}{}\n{GPUS}", usage(&common)));
            return Ok(None);
        }
        options.common = common;
        Ok(Some(options))
    }

    /// The options that a resumed run must have in common with its first part, because the numbers depend on them: each
    /// line of the log judges points that are made of random numbers.
    pub fn of_run(&self) -> String {
        let crate::Options { amp, steps, seed, .. } = &self.common;
        let log_every = self.log_every;
        format!("--amp {} --steps {steps} --seed {seed} --log-every {log_every}", amp.name())
    }
}

/// What `--help` says of the common options but `--ranks`, whose text goes on in the next lines.
fn usage(common: &crate::Options) -> String {
    let text = common.usage();
    let (before, rest) = text.split_once("  --ranks ").unwrap_or((&text, ""));
    let after = rest.find("  --checkpoints ").map_or("", |at| &rest[at..]);
    format!("{before}{after}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usage_lacks_the_ranks_alone() {
        let common = crate::Options::new("gan", 3000);
        let (all, ours) = (common.usage(), usage(&common));
        assert!(all.contains("--ranks") && !ours.contains("--ranks") && !ours.contains("torchrun"));
        for option in
            ["--amp", "--device", "--steps", "--seed", "--checkpoints", "--resume", "--out"]
        {
            assert!(
                ours.contains(&format!("\n  {option} ")) || ours.starts_with("  --amp"),
                "{ours}"
            );
        }
    }
}

//! The command line.

use crate::options::{Flag, OwnOptions};
use anyhow::{Result, bail};
use std::ffi::OsString;

/// The options of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Those that all recipes have.
    pub common: crate::Options,
}

impl OwnOptions for Options {
    const ABOUT: [&'static str; 2] = [
        "\
Trains a generator and a discriminator on eight Gaussians on a ring, and writes a
report of it.

Usage: gan [options]
",
        "
A GPU is used if there is one. Networks this small are not faster there, nor in half
precision; with --amp fp16 each loss has a scale of its own.",
    ];

    const FLAGS: &'static [Flag<Self>] = &[
        ("--ranks", "refused: networks this small train in one process", |_, _| {
            bail!("--ranks: networks this small train in one process; `gpt` has it")
        }),
        ("--eval-every", "refused: each line of the log judges the generator", |_, _| {
            bail!("--eval-every: each line of the log judges the generator; use --log-every")
        }),
    ];

    fn common(&mut self) -> &mut crate::Options {
        &mut self.common
    }
}

impl Options {
    /// The defaults.
    pub fn new(common: crate::Options) -> Self {
        Self { common }
    }

    /// Parses the arguments; `None` after `--help`, which has printed the usage.
    pub fn parse(args: impl IntoIterator<Item: Into<OsString>>) -> Result<Option<Self>> {
        let common = crate::Options::new("gan", 3000);
        Self::new(crate::Options { save_every: 500, log_every: 100, ..common }).take(args)
    }

    /// The options that a resumed run must have in common with its first part, because the numbers depend on them: each
    /// line of the log judges points that are made of random numbers.
    pub fn of_run(&self) -> String {
        let crate::Options { amp, steps, seed, log_every, .. } = &self.common;
        format!("--amp {amp} --steps {steps} --seed {seed} --log-every {log_every}")
    }
}

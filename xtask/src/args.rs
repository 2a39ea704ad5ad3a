//! The arguments of `cargo xtask`.
//!
//! lexopt, a crate for this, returns options in their order: each command would need a loop where it has a line. Five of
//! them pass on what they do not know to another program, for which lexopt has the raw words, as there are here.

use anyhow::{Context, Result, ensure};

use crate::versions::Pair;

/// The words that have not been parsed yet, in order.
#[derive(Debug)]
pub(crate) struct Args(Vec<String>);

impl Args {
    pub(crate) fn new(words: impl IntoIterator<Item = String>) -> Self {
        Self(words.into_iter().collect())
    }

    /// Removes and returns the first word.
    pub(crate) fn next(&mut self) -> Option<String> {
        (!self.0.is_empty()).then(|| self.0.remove(0))
    }

    /// Removes `name` and returns whether it was present.
    pub(crate) fn flag(&mut self, name: &str) -> bool {
        let found = self.own().iter().position(|word| word == name);
        found.map(|at| self.0.remove(at)).is_some()
    }

    /// Removes `name` if it comes first, and returns whether it did: later words belong to another program.
    pub(crate) fn leading_flag(&mut self, name: &str) -> bool {
        let leads = self.0.first().is_some_and(|word| word == name);
        if leads {
            self.0.remove(0);
        }
        leads
    }

    /// Parses `--tch V` or `--tch=V`.
    pub(crate) fn tch(&mut self) -> Result<Option<Pair>> {
        let Some(at) = self.own().iter().position(|word| word.starts_with("--tch")) else {
            return Ok(None);
        };
        let word = self.0.remove(at);
        if let Some(version) = word.strip_prefix("--tch=") {
            return Pair::of_tch(version).map(Some);
        }
        ensure!(word == "--tch", "unknown option `{word}`; did you mean `--tch V`?");
        let missing = "`--tch` needs a version, such as `--tch 0.24`";
        let version = (at < self.0.len()).then(|| self.0.remove(at)).context(missing)?;
        Pair::of_tch(&version).map(Some)
    }

    /// Parses `--tch V` or `--tch=V` if it comes first: later words belong to another program.
    pub(crate) fn leading_tch(&mut self) -> Result<Option<Pair>> {
        let leads = self.0.first().is_some_and(|word| word.starts_with("--tch"));
        if leads { self.tch() } else { Ok(None) }
    }

    /// Returns the remaining words, for the program to run.
    pub(crate) fn rest(mut self) -> Vec<String> {
        if self.0.first().is_some_and(|word| word == "--") {
            self.0.remove(0);
        }
        self.0
    }

    /// Fails if words remain.
    pub(crate) fn end(self) -> Result<()> {
        let Self(words) = self;
        ensure!(words.is_empty(), "unknown argument `{}`; see `cargo xtask help`", words.join(" "));
        Ok(())
    }

    /// The words before `--`. Those after it belong to another program.
    fn own(&self) -> &[String] {
        let end = self.0.iter().position(|word| word == "--").unwrap_or(self.0.len());
        &self.0[..end]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(line: &str) -> Args {
        Args::new(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn both_spellings_of_tch_are_accepted_anywhere() {
        for line in ["--tch 0.24 rest", "--tch=0.24 rest", "rest --tch 0.24"] {
            let mut args = args(line);
            assert_eq!(args.tch().unwrap().map(|pair| pair.tch), Some("0.24"), "{line}");
            assert_eq!(args.rest(), ["rest"], "{line}");
        }
    }

    #[test]
    fn tch_without_a_supported_version_is_an_error() {
        for line in ["--tch", "--tch 0.1", "--tchh 0.24"] {
            assert!(args(line).tch().is_err(), "{line}");
        }
    }

    #[test]
    fn words_after_two_dashes_belong_to_the_program() {
        let mut args = args("-- --tch 0.24 --publishable");
        assert_eq!(args.tch().unwrap(), None);
        assert!(!args.flag("--publishable"));
        assert_eq!(args.rest(), ["--tch", "0.24", "--publishable"]);
    }

    #[test]
    fn a_program_keeps_its_own_tch_option() {
        let mut ours = args("--tch 0.24 cargo run");
        assert_eq!(ours.leading_tch().unwrap().map(|pair| pair.tch), Some("0.24"));
        let mut theirs = args("program --tch 0.24");
        assert_eq!(theirs.leading_tch().unwrap(), None);
        assert_eq!(theirs.rest(), ["program", "--tch", "0.24"]);
    }

    #[test]
    fn a_flag_that_follows_the_program_is_the_programs() {
        assert!(args("--values program").leading_flag("--values"));
        assert!(!args("program --values").leading_flag("--values"));
    }

    #[test]
    fn an_unknown_argument_is_an_error() {
        let mut args = args("--publishable --fast");
        assert!(args.flag("--publishable"));
        let error = args.end().unwrap_err().to_string();
        assert!(error.contains("--fast"), "{error}");
    }
}

//! The progress that is shown during a run.

use super::Ranks;
use anyhow::Result;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::fmt::Display;
use std::io::{self, Write};

/// Prints a line on stderr. `eprintln!` would end the training where stderr is a full disk or a pipe that nobody reads,
/// and it would write the line in pieces, between which those of another rank may appear.
pub fn tell(line: impl Display) {
    drop(io::stderr().write_all(format!("{line}\n").as_bytes()));
}

/// Prints a line on stdout, like [`tell`]: the report is yet to be written where nobody reads the table.
pub fn print(line: impl Display) {
    drop(io::stdout().write_all(format!("{line}\n").as_bytes()));
}

/// The progress of one run: a bar on a terminal, lines in a log, or nothing.
#[derive(Debug)]
pub enum Progress {
    /// An indicatif bar on stderr.
    Bar(ProgressBar),
    /// Lines on stderr: one after each `every` steps, none if that is 0, and after the last step.
    Lines { name: String, steps: u64, every: u64 },
    /// Nothing.
    Silent,
}

impl Progress {
    /// Shows a run of `steps` steps: as a bar on a terminal, otherwise with a line after each `every` steps, or none if
    /// that is 0.
    pub fn new(name: &str, steps: u64, every: u64) -> Result<Self> {
        let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr());
        if bar.is_hidden() {
            return Ok(Self::Lines { name: name.to_owned(), steps, every });
        }
        let template = "{prefix} {bar:32} {pos:>4}/{len} {elapsed:>4}  {msg}";
        bar.set_style(ProgressStyle::with_template(template)?);
        bar.set_prefix(name.to_owned());
        Ok(Self::Bar(bar))
    }

    /// Shows a run on the first rank, and nothing on the others.
    pub fn on_first(ranks: &Ranks, name: &str, steps: u64, every: u64) -> Result<Self> {
        if ranks.is_first() { Self::new(name, steps, every) } else { Ok(Self::silent()) }
    }

    /// Shows nothing: for tests, and for ranks other than the first.
    pub fn silent() -> Self {
        Self::Silent
    }

    /// Called before the first step of a run that goes on after some steps.
    pub fn resumed(&self, step: u64) {
        match self {
            Self::Bar(bar) => {
                bar.set_position(step);
                // The time that is left is judged by the steps of this process.
                bar.reset_eta();
            }
            Self::Lines { name, steps, .. } if step > 0 => {
                tell(format_args!("{name}  resumes after step {step}/{steps}"));
            }
            Self::Lines { .. } | Self::Silent => {}
        }
    }

    /// Called after step `done`, counted from 1, with what is shown beside it if its numbers are known.
    pub fn step(&self, done: u64, message: Option<String>) {
        match (self, message) {
            (Self::Bar(bar), message) => {
                message.into_iter().for_each(|message| bar.set_message(message));
                bar.set_position(done);
            }
            (Self::Lines { name, steps, every }, Some(message)) if *every > 0 => {
                if done.is_multiple_of(*every) || done == *steps {
                    tell(format_args!("{name}  step {done:>3}/{steps}  {message}"));
                }
            }
            (Self::Lines { .. } | Self::Silent, _) => {}
        }
    }

    /// Prints a line, above the bar if there is one.
    pub fn say(&self, line: &str) {
        match self {
            Self::Bar(bar) => bar.suspend(|| tell(line)),
            Self::Lines { .. } => tell(line),
            Self::Silent => {}
        }
    }

    /// Prints a line where there is no bar, whose message says as much.
    pub fn say_in_log(&self, line: &str) {
        if let Self::Lines { .. } = self {
            tell(line);
        }
    }

    /// Leaves the bar on the screen as it is.
    pub fn finish(&self) {
        if let Self::Bar(bar) = self {
            bar.abandon();
        }
    }
}

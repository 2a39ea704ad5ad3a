//! The progress that is shown during a run.

use super::train::{Precision, Step};
use anyhow::Result;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Without a terminal, a line is printed after this many epochs.
const LINE_EPOCHS: usize = 5;

/// The progress of one run: a bar on a terminal, lines in a log, or nothing.
#[derive(Debug)]
pub enum Progress {
    /// An indicatif bar on stderr.
    Bar { bar: ProgressBar, epochs: usize },
    /// Lines on stderr.
    Lines { precision: Precision, epochs: usize },
    /// Nothing.
    Silent,
}

impl Progress {
    /// Shows a run of `steps` steps.
    pub fn new(precision: Precision, epochs: usize, steps: usize) -> Result<Self> {
        let bar = ProgressBar::with_draw_target(Some(steps as u64), ProgressDrawTarget::stderr());
        if bar.is_hidden() {
            return Ok(Self::Lines { precision, epochs });
        }
        bar.set_style(ProgressStyle::with_template(
            "{prefix} {bar:32} {pos:>4}/{len} {elapsed:>4}  {msg}",
        )?);
        bar.set_prefix(precision.name());
        Ok(Self::Bar { bar, epochs })
    }

    /// Shows nothing.
    pub fn silent() -> Self {
        Self::Silent
    }

    /// Called before the first step of a run that resumes after some epochs.
    pub fn resumed(&self, epoch: usize, steps: usize) {
        match self {
            Self::Bar { bar, .. } => bar.set_position(steps as u64),
            Self::Lines { precision, epochs } if epoch > 0 => {
                eprintln!("{}  resumes after epoch {epoch}/{epochs}", precision.name());
            }
            Self::Lines { .. } | Self::Silent => {}
        }
    }

    /// Called after every step.
    pub fn step(&self, epoch: usize, step: &Step) {
        if let Self::Bar { bar, epochs } = self {
            let scale = step.scale.map_or_else(String::new, |scale| format!("  scale {scale}"));
            bar.set_message(format!("epoch {epoch}/{epochs}  loss {:.4}{scale}", step.loss));
            bar.inc(1);
        }
    }

    /// Called after every epoch with its mean loss.
    pub fn epoch(&self, epoch: usize, loss: f64) {
        if let Self::Lines { precision, epochs } = self
            && (epoch.is_multiple_of(LINE_EPOCHS) || epoch == *epochs)
        {
            eprintln!("{}  epoch {epoch:>2}/{epochs}  loss {loss:.4}", precision.name());
        }
    }

    /// Leaves the finished bar on the screen.
    pub fn finish(&self) {
        if let Self::Bar { bar, .. } = self {
            bar.finish();
        }
    }
}

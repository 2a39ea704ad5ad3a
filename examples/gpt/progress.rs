//! The progress that is shown during a run.

use super::Precision;
use anyhow::Result;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::cell::Cell;

/// Without a terminal, a line is printed after this many steps.
const LINE_STEPS: usize = 50;

/// The progress of one run: a bar on a terminal, lines in a log, or nothing.
#[derive(Debug)]
pub enum Progress {
    /// An indicatif bar on stderr.
    Bar(ProgressBar),
    /// Lines on stderr.
    Lines { name: &'static str, steps: usize, done: Cell<usize> },
    /// Nothing.
    Silent,
}

impl Progress {
    /// Shows a run of `steps` steps.
    pub fn new(precision: Precision, steps: usize) -> Result<Self> {
        let bar = ProgressBar::with_draw_target(Some(steps as u64), ProgressDrawTarget::stderr());
        if bar.is_hidden() {
            return Ok(Self::Lines { name: precision.name(), steps, done: Cell::new(0) });
        }
        let template = "{prefix} {bar:32} {pos:>4}/{len} {elapsed:>4}  {msg}";
        bar.set_style(ProgressStyle::with_template(template)?);
        bar.set_prefix(format!("GPT {}", precision.name()));
        Ok(Self::Bar(bar))
    }

    /// Called after every step.
    pub fn step(&self, loss: f64) {
        match self {
            Self::Bar(bar) => {
                bar.set_message(format!("loss {loss:.3}"));
                bar.inc(1);
                if bar.length() == Some(bar.position()) {
                    bar.finish();
                }
            }
            Self::Lines { name, steps, done } => {
                done.set(done.get() + 1);
                let step = done.get();
                if step.is_multiple_of(LINE_STEPS) || step == *steps {
                    eprintln!("GPT {name}  step {step:>3}/{steps}  loss {loss:.3}");
                }
            }
            Self::Silent => {}
        }
    }
}

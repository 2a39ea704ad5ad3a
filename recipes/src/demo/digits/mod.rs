//! A small convolutional network on real handwritten digits.

pub mod computer;
pub mod data;
pub mod model;
pub mod options;
pub mod report;
pub mod table;
pub mod train;

use crate::{PRECISIONS, precision_name};
use crate::{Progress, Ranks};
use anyhow::Result;
use options::Options;
use train::RunResult;

/// Trains once per precision, from the same initial weights and over the same batches, in this process alone or on
/// several ranks, the first of which shows the progress.
pub fn run(options: &Options, progress: bool, ranks: &Ranks) -> Result<Vec<RunResult>> {
    let device = options.device()?;
    // With one thread the results do not depend on the number of cores, and on a busy machine no thread has to wait for
    // another one that is not scheduled.
    tch::set_num_threads(1);
    let digits = data::Digits::load(&data::default_path())?;
    let mut runs = Vec::new();
    for precision in PRECISIONS {
        let steps = options.epochs * digits.train.batches();
        let bar = if progress && ranks.is_first() {
            Progress::new(precision_name(precision), steps as u64, 0)?
        } else {
            Progress::silent()
        };
        runs.push(train::train(precision, &digits, device, options, &bar, ranks)?);
        bar.finish();
    }
    Ok(runs)
}

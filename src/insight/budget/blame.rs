//! The first operator whose results rounding does not explain.

use super::program::Mode;
use super::{BudgetOperator, BudgetRun, Runner};
use crate::error::{Error, Result};
use crate::ffi::insight::{Compared, EventKind, RecordingMode, Reference};
use crate::insight::audit::place;
use crate::insight::recording::Recording;
use crate::optim::AmpOptimizer;
use tch::Tensor;

/// How many runs with noise are recorded.
const RUNS: usize = 4;

/// The multiple of the noise that is rounding.
const LIMIT: f64 = 3.0;

/// The smallest noise.
const LEAST_NOISE: f64 = 2e-6;

/// Records the iteration in f32, in half precision and with noise, and compares operator by operator.
pub(super) fn first_operator<O: AmpOptimizer + 'static, E: Into<Error>>(
    runner: &mut Runner,
    scale: f64,
    optimizer: &mut impl FnMut() -> std::result::Result<O, E>,
    iteration: &mut impl FnMut(&mut BudgetRun, &mut O) -> Result<Tensor>,
) -> Result<Option<BudgetOperator>> {
    let reference = Reference::new()?;
    let mut record = |runner: &mut Runner, mode, how| {
        runner.program.restore(mode)?;
        runner.program.clear_gradients()?;
        // With a scale in f32 as well, so that all runs call the same operators.
        let scaler = runner.program.scaler(scale)?;
        let (observed, _) = runner.run(mode, scaler, Some(how), optimizer, iteration)?;
        Ok::<_, Error>(observed.recording)
    };
    let of_f32 = record(runner, Mode::F32, RecordingMode::Reference(&reference))?;
    let half = record(runner, Mode::Half, RecordingMode::Compared(&reference))?;
    let mut noisy = Vec::new();
    for _ in 0..RUNS {
        runner.seed += 1;
        let mode = Mode::Noise { seed: runner.seed };
        noisy.extend(record(runner, mode, RecordingMode::Compared(&reference))?);
    }
    let (Some(_), Some(half)) = (of_f32, half) else { return Ok(None) };
    Ok(first_over(&half, &noisy))
}

fn first_over(half: &Recording, noisy: &[Recording]) -> Option<BudgetOperator> {
    let noise: Vec<Vec<Option<Compared>>> = noisy
        .iter()
        .map(|run| forward(run).map(|index| run.events[index].compared).collect())
        .collect();
    for (position, index) in forward(half).enumerate() {
        let event = &half.events[index];
        let found = |multiple| BudgetOperator {
            part: half.path(index).unwrap_or_else(|| place(half, index)),
            operator: event.name.trim_start_matches("aten::").to_owned(),
            multiple,
        };
        let Some(compared) = &event.compared else { return Some(found(None)) };
        let errors: Option<Vec<f64>> =
            noise.iter().map(|run| run.get(position)?.as_ref().map(error)).collect();
        let errors = errors?;
        let squares: f64 = errors.iter().map(|error| error * error).sum();
        let noise = (squares / errors.len() as f64).sqrt().max(LEAST_NOISE);
        let multiple = error(compared) / noise;
        if multiple.is_nan() || multiple > LIMIT {
            return Some(found(Some(multiple)));
        }
    }
    None
}

/// The operators that the program called before the backward pass and that are compared.
fn forward(recording: &Recording) -> impl Iterator<Item = usize> {
    let backward = recording.events.iter().position(|event| event.kind == EventKind::Node);
    let end = backward.unwrap_or(recording.events.len());
    let ended = recording.ended().into_iter();
    ended.filter(move |&index| index < end && recording.events[index].is_counted)
}

fn error(compared: &Compared) -> f64 {
    if compared.norm > 0.0 {
        compared.difference / compared.norm
    } else if compared.difference == 0.0 {
        0.0
    } else {
        f64::INFINITY
    }
}

//! The first operator whose results rounding does not explain.

use super::deviation::{multiple, root_mean_square};
use super::program::Mode;
use super::{BudgetOperator, BudgetQuantity, Runner};
use crate::error::Result;
use crate::ffi::insight::{Compared, EventKind, RecordingMode, Reference};
use crate::insight::audit::{place, relative};
use crate::insight::recording::Recording;

/// How many runs with noise are recorded.
const RUNS: usize = 4;

/// Records the iteration in f32, in half precision and with noise, and compares operator by operator.
pub(super) fn first_operator(
    runner: &mut Runner<'_>,
    scale: f64,
) -> Result<Option<BudgetOperator>> {
    let reference = Reference::new()?;
    let beside = || Some(RecordingMode::Compared(&reference));
    // With a scale in f32 as well, so that all runs call the same operators.
    let scaler = runner.program.scaler(scale)?;
    let _f32 = runner.run_afresh(Mode::F32, scaler, Some(RecordingMode::Reference(&reference)))?;
    let scaler = runner.program.scaler(scale)?;
    let half = runner.run_afresh(Mode::Half, scaler, beside())?.recording;
    let mut noisy = Vec::new();
    for _ in 0..RUNS {
        noisy.extend(runner.run_with_noise(scale, beside())?.recording);
    }
    Ok(half.and_then(|half| first_over(&half, &noisy)))
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
        let Some(compared) = event.compared else { return Some(found(None)) };
        let errors = noise.iter().map(|run| Some(relative((*run.get(position)?)?)));
        let errors = errors.collect::<Option<Vec<f64>>>()?;
        let multiple = multiple(relative(compared), root_mean_square(errors.into_iter()));
        if multiple > BudgetQuantity::Output.limit() {
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

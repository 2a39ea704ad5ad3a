//! Counts of the exponents of gradients, and histories of steps.

use std::ptr;

use tch::Tensor;

use super::{Counted, call, given};
use crate::error::Result;
use crate::sys::insight as sys;

/// The exponent of the first bin for exponents.
pub(crate) const LOWEST_EXPONENT: i32 = -sys::EXPONENTS_BELOW_ZERO;

/// A parameter whose gradient is counted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CountedGradient<'a> {
    pub(crate) parameter: &'a Tensor,
    /// The layer.
    pub(crate) row: usize,
    /// Whether the gradient has been divided by the scale.
    pub(crate) unscaled: bool,
}

/// The counts of one row.
#[derive(Clone, Debug, Default)]
pub(crate) struct ExponentRow {
    pub(crate) zeros: u64,
    pub(crate) infinite: u64,
    pub(crate) nan: u64,
    /// From [`LOWEST_EXPONENT`] on.
    pub(crate) exponents: Vec<u64>,
}

/// Counts on the host.
#[derive(Clone, Debug, Default)]
pub(crate) struct ExponentCounts {
    pub(crate) observed: u64,
    pub(crate) non_finite: u64,
    pub(crate) rows: Vec<ExponentRow>,
}

/// Adds the exponents of gradients to `counts`, which are not changed, and returns the new counts: see
/// `tamp_exponents_count`.
pub(crate) fn exponents_count(
    counts: Option<&Tensor>,
    gradients: &[CountedGradient<'_>],
    rows: usize,
    scale: Option<&Tensor>,
) -> Result<Tensor> {
    let [counts, scale] = [counts, scale].map(optional);
    let raw = gradients.iter().map(|gradient| sys::CountedGradient {
        parameter: gradient.parameter.as_ptr(),
        row: gradient.row as i64,
        unscaled: gradient.unscaled.into(),
    });
    let raw: Vec<_> = raw.collect();
    assert!(gradients.iter().all(|gradient| gradient.row < rows), "every gradient has a row");
    let (array, count, rows) = (raw.as_ptr(), raw.len(), rows as i64);
    // SAFETY: the array has `count` elements with live tensors and rows below `rows`; the other tensors are null or
    // live, and `err` is valid for a write.
    given(call(|err| unsafe { sys::tamp_exponents_count(counts, array, count, rows, scale, err) })?)
}

/// Brings counts to the host. Synchronizes on a device.
pub(crate) fn exponents_read(counts: &Tensor) -> Result<ExponentCounts> {
    let numbers = super::numbers_read(&[counts])?;
    let numbers: Vec<_> = numbers.into_iter().map(|number| number as u64).collect();
    let Some((totals, rows)) = numbers.split_at_checked(sys::COUNTS_ROWS) else {
        return Ok(ExponentCounts::default());
    };
    let row = |row: &[u64]| ExponentRow {
        zeros: row[sys::BIN_ZERO],
        infinite: row[sys::BIN_INFINITE],
        nan: row[sys::BIN_NAN],
        exponents: row[sys::BIN_EXPONENTS..].to_vec(),
    };
    Ok(ExponentCounts {
        observed: totals[sys::COUNTS_OBSERVED],
        non_finite: totals[sys::COUNTS_NON_FINITE],
        rows: rows.chunks_exact(sys::BINS).map(row).collect(),
    })
}

/// A number of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) enum StepNumber<'a> {
    Host(f64),
    Device(&'a Tensor),
}

/// The numbers of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepNumbers<'a> {
    pub(crate) scale: StepNumber<'a>,
    /// Not zero if the step was skipped.
    pub(crate) flag: StepNumber<'a>,
    pub(crate) norm: Option<&'a Tensor>,
    pub(crate) loss: Option<&'a Tensor>,
    pub(crate) learning_rate: StepNumber<'a>,
    /// Whether the step may have been skipped as a spike.
    pub(crate) is_judged: bool,
}

/// The numbers of a step on the host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReadNumbers {
    pub(crate) scale: f64,
    pub(crate) is_skipped: bool,
    pub(crate) norm: Option<f64>,
    pub(crate) loss: Option<f64>,
    pub(crate) learning_rate: f64,
    pub(crate) is_judged: bool,
}

/// Writes the numbers of a step to the next row of a history, the host's or that after all rows which a device has
/// counted, or begins one of `length` rows: see `tamp_history_record`.
pub(crate) fn history_record(
    history: Option<&Tensor>,
    length: usize,
    next: Counted<usize, &Tensor>,
    numbers: StepNumbers<'_>,
) -> Result<Tensor> {
    let raw = raw_numbers(numbers);
    let (row, count) = match next {
        Counted::Host(row) => (row, ptr::null_mut()),
        Counted::Device(count) => (0, super::pointer(count)),
    };
    assert!(row < length, "the history has this row");
    let (history, length, row) = (optional(history), length as i64, row as i64);
    let raw = raw.as_ptr();
    // SAFETY: the array has STEP_NUMBERS numbers, whose tensors are null or live; the history and the count are null or
    // live, are changed through libtorch's own handles, which alias freely, and `err` is valid for a write.
    given(call(|err| unsafe { sys::tamp_history_record(history, length, row, count, raw, err) })?)
}

fn raw_numbers(numbers: StepNumbers<'_>) -> [sys::StepNumber; sys::STEP_NUMBERS] {
    let StepNumbers { scale, flag, norm, loss, learning_rate, is_judged } = numbers;
    let known = [
        (norm.is_some(), sys::STEP_HAS_NORM),
        (loss.is_some(), sys::STEP_HAS_LOSS),
        (is_judged, sys::STEP_HAS_VERDICT),
    ];
    let known = known.iter().filter(|(has, _)| *has).map(|(_, mark)| mark).sum::<u8>();
    let or_none = |number: Option<&'_ Tensor>| sys::StepNumber {
        on_device: optional(number),
        on_host: f64::NAN,
    };
    let raw = |number: StepNumber<'_>| match number {
        StepNumber::Host(on_host) => sys::StepNumber { on_device: ptr::null(), on_host },
        StepNumber::Device(tensor) => or_none(Some(tensor)),
    };
    let mut all = [raw(StepNumber::Host(known.into())); sys::STEP_NUMBERS];
    all[sys::STEP_SCALE] = raw(scale);
    all[sys::STEP_FLAG] = raw(flag);
    all[sys::STEP_NORM] = or_none(norm);
    all[sys::STEP_LOSS] = or_none(loss);
    all[sys::STEP_RATE] = raw(learning_rate);
    all
}

/// Brings the first rows of a history to the host. Synchronizes on a device.
pub(crate) fn history_read(history: &Tensor, rows: usize) -> Result<Vec<ReadNumbers>> {
    let numbers = super::numbers_read(&[&history.f_narrow(0, 0, rows as i64)?])?;
    let rows = numbers.chunks_exact(sys::STEP_NUMBERS);
    let row = |row: &[f64]| {
        let has = |mark: u8| row[sys::STEP_KNOWN] as u8 & mark != 0;
        ReadNumbers {
            scale: row[sys::STEP_SCALE],
            is_skipped: row[sys::STEP_FLAG] != 0.0,
            norm: has(sys::STEP_HAS_NORM).then_some(row[sys::STEP_NORM]),
            loss: has(sys::STEP_HAS_LOSS).then_some(row[sys::STEP_LOSS]),
            learning_rate: row[sys::STEP_RATE],
            is_judged: has(sys::STEP_HAS_VERDICT),
        }
    };
    Ok(rows.map(row).collect())
}

fn optional(tensor: Option<&Tensor>) -> *const crate::sys::Tensor {
    tensor.map_or(ptr::null(), |tensor| tensor.as_ptr())
}

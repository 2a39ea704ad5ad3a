//! Counts of the exponents of gradients, and histories of steps.

use std::ptr;

use tch::Tensor;

use super::{call, given};
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

/// The numbers of a step, as far as they are known.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StepNumbers<'a> {
    pub(crate) scale: Option<&'a Tensor>,
    /// Not zero if the step was skipped.
    pub(crate) flag: Option<&'a Tensor>,
    pub(crate) norm: Option<&'a Tensor>,
    pub(crate) loss: Option<&'a Tensor>,
}

/// The numbers of a step on the host; NaN for what is not known.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReadNumbers {
    pub(crate) scale: f64,
    pub(crate) flag: f64,
    pub(crate) norm: f64,
    pub(crate) loss: f64,
}

/// Writes the numbers of a step to a row of a history, or begins one of `length` rows: see `tamp_history_record`.
pub(crate) fn history_record(
    history: Option<&Tensor>,
    length: usize,
    row: usize,
    numbers: StepNumbers<'_>,
) -> Result<Tensor> {
    assert!(row < length, "the history has this row");
    let mut raw = [ptr::null(); sys::STEP_NUMBERS];
    raw[sys::STEP_SCALE] = optional(numbers.scale);
    raw[sys::STEP_FLAG] = optional(numbers.flag);
    raw[sys::STEP_NORM] = optional(numbers.norm);
    raw[sys::STEP_LOSS] = optional(numbers.loss);
    let (history, length, row) = (optional(history), length as i64, row as i64);
    let raw = raw.as_ptr();
    // SAFETY: the array has a number for each of STEP_NUMBERS, null or live; the history is null or live, is changed
    // through libtorch's own handle, which aliases freely, and `err` is valid for a write.
    given(call(|err| unsafe { sys::tamp_history_record(history, length, row, raw, err) })?)
}

/// Brings all rows of a history to the host. Synchronizes on a device.
pub(crate) fn history_read(history: &Tensor) -> Result<Vec<ReadNumbers>> {
    let numbers = super::numbers_read(&[history])?;
    let rows = numbers.chunks_exact(sys::STEP_NUMBERS);
    let row = |row: &[f64]| ReadNumbers {
        scale: row[sys::STEP_SCALE],
        flag: row[sys::STEP_FLAG],
        norm: row[sys::STEP_NORM],
        loss: row[sys::STEP_LOSS],
    };
    Ok(rows.map(row).collect())
}

fn optional(tensor: Option<&Tensor>) -> *const crate::sys::Tensor {
    tensor.map_or(ptr::null(), |tensor| tensor.as_ptr())
}

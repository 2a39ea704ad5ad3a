//! Correct training.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use tch::{Device, Kind};

use crate::budget::models::{MODELS, Model};
use crate::budget::program::{Form, Program};
use crate::budget::{DTYPES, alone, seeds};
use testkit::rows::rows;

/// What is changed and does no harm.
const HARMLESS: [&str; 11] = [
    "none",
    "keep",
    "no_cache",
    "f32_lists",
    "cast_inputs",
    "own_copies",
    "other_order",
    "gradients_rounded_once_more",
    "softmax_returns_half",
    "accumulated",
    "losses_apart",
];

/// The sizes of inputs.
pub(crate) const SIZES: [f64; 3] = [1.0, 0.1, 10.0];

/// A row of a report that is within its budget, so that its numbers are finite.
#[derive(Deserialize)]
struct Row {
    quantity: String,
    name: String,
    error: f64,
    factor: f64,
    multiple: f64,
    limit: f64,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { quantity, name, error, factor, multiple, limit } = self;
        write!(
            f,
            "{quantity} {name}: {multiple:.1} × noise, limit {limit} (error {error:.1e}, {factor:.4} × f32)"
        )
    }
}

/// The change is in half precision alone, in a branch on the dtype or in every run, in turns, but for those that differ
/// by more than rounding if they are not in all. With `TCH_AMP_LONG=1` 2,112 runs.
#[test]
fn correct_training_is_within_its_budget() {
    let _alone = alone();
    let mut largest = BTreeMap::<String, f64>::new();
    let (mut runs, mut iterations, mut outputs, mut over) = (0, Vec::new(), Vec::new(), Vec::new());
    for seed in seeds(1, 12) {
        for kind in MODELS {
            for dtype in DTYPES {
                for (change, name) in (0..).zip(HARMLESS) {
                    let size = SIZES[(seed % 3) as usize];
                    let model = Model::new(kind, seed, size, Device::Cpu);
                    let is_whole = ["accumulated", "losses_apart"].contains(&name);
                    let turn =
                        (seed as usize + change as usize + usize::from(dtype == Kind::Half)) % 3;
                    let form = if is_whole { Form::Every } else { Form::ALL[turn] };
                    let mut program = Program::of(model, dtype, name, seed).form(form);
                    // From 1 to 2^16.
                    program.scale = 2f64.powi((7 * seed as i32 + 5 * change) % 17);
                    let report = program.measure().unwrap();
                    runs += 1;
                    iterations.push(report.iterations);
                    if !report.is_within() {
                        over.push(format!("{kind}, {name}, {form:?}, seed {seed}: {report}"));
                        continue;
                    }
                    for row in rows::<Row>(&report, "rows") {
                        if row.multiple > row.limit / 2.0 {
                            println!("{kind}, {dtype:?}, {name}, {form:?}, seed {seed}: {row}");
                        }
                        if row.quantity == "Output" && name == "none" {
                            outputs.push(row.multiple);
                        }
                        let so_far = largest.entry(row.quantity).or_default();
                        *so_far = so_far.max(row.multiple);
                    }
                }
            }
        }
    }
    println!("{runs} runs, {largest:?}");
    assert!(over.is_empty(), "{} of {runs}:\n{}", over.len(), over.join("\n\n"));
    // Rounding to nearest has 1/√2 of the error of rounding at random.
    outputs.sort_by(f64::total_cmp);
    let median = outputs[outputs.len() / 2];
    assert!(
        (0.6..0.8).contains(&median),
        "the median of {} outputs is {median} × noise",
        outputs.len()
    );
    iterations.sort_unstable();
    assert_eq!(iterations[iterations.len() / 2], 8);
}

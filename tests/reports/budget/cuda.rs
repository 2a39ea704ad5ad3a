//! Budgets with the lists of CUDA, on simulated GPUs.

use tch::Kind;

use crate::budget::correct::SIZES;
use crate::budget::models::{MODELS, Model};
use crate::budget::program::Program;
use crate::budget::{alone, seeds};
use testkit::gpus_that_round_as_the_cpu;

/// With `TCH_AMP_LONG=1` 200 runs in fp16.
#[test]
fn correct_training_in_fp16_is_within_its_budget() {
    let gpus = gpus_that_round_as_the_cpu();
    let _alone = alone();
    let mut over = Vec::new();
    for (seed, &gpu) in seeds(4, 25).zip(gpus.iter().cycle()) {
        for kind in MODELS {
            let model = Model::new(kind, seed, SIZES[(seed % 3) as usize], gpu);
            let report = Program::of(model, Kind::Half, "none", seed).measure().unwrap();
            if !report.is_within() {
                over.push(format!("{kind}, seed {seed}: {report}"));
            }
        }
    }
    assert!(over.is_empty(), "{}:\n{}", over.len(), over.join("\n\n"));
}

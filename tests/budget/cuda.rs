//! Budgets with the lists of CUDA, on simulated GPUs.

use tch::{Device, Kind};

use crate::common::simulation::is_simulated;
use crate::correct::SIZES;
use crate::models::{MODELS, Model};
use crate::program::Program;
use crate::{alone, seeds};

/// With `TCH_AMP_LONG=1` 200 runs in fp16.
#[test]
fn correct_training_in_fp16_is_within_its_budget() {
    if !is_simulated() {
        return println!("skipped: it needs simulated GPUs");
    }
    let _alone = alone();
    let mut over = Vec::new();
    let mut runs = 0;
    for seed in seeds(4, 25) {
        for kind in MODELS {
            let model =
                Model::new(kind, seed, SIZES[(seed % 3) as usize], Device::Cuda(seed as usize % 2));
            let report = Program::of(model, Kind::Half, "none", seed).measure().unwrap();
            runs += 1;
            if !report.is_within() {
                over.push(format!("{kind}, seed {seed}: {report}"));
            }
        }
    }
    assert!(over.is_empty(), "{} of {runs}:\n{}", over.len(), over.join("\n\n"));
}

//! Budgets that are kept.

use std::fs;

use tch::{Device, Kind};
use tch_amp::insight::{Budget, BudgetFile, BudgetReport};
use tch_amp::{Autocast, Error, Result};

use crate::budget::alone;
use crate::budget::models::Model;
use crate::budget::program::Program;
use testkit::assert_refused;
use testkit::rng::Rng;

/// The noise of this model, measured with libtorch 2.11. `TCH_AMP_WRITE_GOLDEN=1` writes it anew.
const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/reports/budget/golden.json");

fn check(program: &Program, file: &BudgetFile) -> Result<BudgetReport> {
    let optimizer = || program.optimizer();
    program.budget().check(file, optimizer, |run, optimizer| program.iterate(run, optimizer))
}

#[test]
fn a_kept_budget_holds_for_every_libtorch() {
    let _alone = alone();
    let program = |change| {
        let mut model = Model::new("mlp", 3, 1.0, Device::Cpu);
        model.redraw(&mut Rng::new(3));
        Program::of(model, Kind::BFloat16, change, 3)
    };
    if std::env::var("TCH_AMP_WRITE_GOLDEN").is_ok_and(|value| value == "1") {
        let file = program("none").measure().unwrap().file();
        fs::write(GOLDEN, serde_json::to_string(&file).unwrap() + "\n").unwrap();
    }
    let file: BudgetFile = serde_json::from_str(&fs::read_to_string(GOLDEN).unwrap()).unwrap();
    let report = check(&program("none"), &file).unwrap();
    assert_eq!(report.iterations, 4);
    report.assert();
    for fault in ["stale_copy_of_one_layer", "unscale_is_skipped", "no_master_weights"] {
        let report = check(&program(fault), &file).unwrap();
        assert!(!report.is_within(), "{fault}: {report}");
    }
}

#[test]
fn a_file_of_another_program_is_refused() {
    let _alone = alone();
    let program = Program::new("vae", Kind::BFloat16, "none", 0);
    let file = program.measure().unwrap().file();
    check(&program, &file).unwrap().assert();
    let other_numbers =
        Program::of(Model::new("vae", 0, 0.5, Device::Cpu), Kind::BFloat16, "none", 0);
    let other_dtype = Program::new("vae", Kind::Half, "none", 0);
    let other_model = Program::new("mlp", Kind::BFloat16, "none", 0);
    for (other, problem) in [
        (other_numbers, "so fix the seed or measure again"),
        (other_dtype, "is of bf16 on cpu, and the region has fp16 on cpu: measure again"),
        (other_model, "so fix the seed or measure again"),
    ] {
        let refused = check(&other, &file);
        let Err(Error::InvalidArgument { problem: told, .. }) = refused else {
            panic!("{refused:?}")
        };
        assert!(told.ends_with(problem), "{told}");
    }
}

#[test]
fn reports_are_data() {
    let _alone = alone();
    for fault in ["none", "layer_is_detached", "unscale_is_skipped"] {
        let report = Program::new("mlp", Kind::BFloat16, fault, 0).measure().unwrap();
        let text = serde_json::to_string(&report).unwrap();
        let read: BudgetReport = serde_json::from_str(&text).unwrap();
        // NaN is not equal to itself.
        assert_eq!(format!("{read:?}"), format!("{report:?}"));
    }
}

#[test]
fn a_scale_that_rounds_is_refused() {
    let _alone = alone();
    let program = Program::new("mlp", Kind::BFloat16, "none", 0);
    for scale in [0.0, -2.0, 3.0, f64::NAN, f64::INFINITY] {
        let budget = Budget::new(&program.model.vs, Autocast::new(Device::Cpu)).scale(scale);
        let measured = budget
            .measure(|| program.optimizer(), |run, optimizer| program.iterate(run, optimizer));
        assert_refused!(measured, Error::InvalidArgument { name: "scale", .. });
    }
}

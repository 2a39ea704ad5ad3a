//! Faults that are planted in the shim of a debug build make these tests fail.

use tch::{Device, Kind, Tensor};
use tch_amp::optim::AdamW;
use tch_amp::scaler::ScalerError;
use tch_amp::{Error, GradScaler};

use testkit::programs::passes;
use testkit::simulation::Simulation;

/// The names of the faults in csrc/, each with a test of this program that has to detect it.
const FAULTS: [(&str, &str); 8] = [
    ("wait", "syncs::an_iteration_of_a_fused_optimizer_does_not_synchronize"),
    ("launches", "steps::a_step_launches_as_often_for_many_small_parameters_as_for_few"),
    ("memory", "steps::a_step_of_a_large_model_needs_at_most_four_bytes_for_each_number"),
    ("late_allocation", "failing_steps::a_step_that_runs_out_of_memory_changes_nothing"),
    ("host_read", "syncs::a_host_optimizer_synchronizes_once"),
    ("early_read", "skips::steps_are_counted_correctly_however_late_the_flags_arrive"),
    ("unordered_fetch", "saved_tensors::what_was_on_the_host_comes_back_with_the_same_bits"),
    ("two_for_true", "skips::a_step_that_overflows_on_two_devices_is_skipped_on_both"),
];

/// Runs only with the planted fault, with which the kernels of a step have run and the step fails nevertheless.
#[test]
#[ignore = "for the fault `half_way`; gradients_of_a_step_that_fails_midway_are_unusable runs it"]
fn a_step_fails_half_way() {
    let Some(_simulation) = Simulation::find() else { return };
    let w = Tensor::ones([3], (Kind::Float, Device::Cuda(0))).set_requires_grad(true);
    let mut opt = AdamW::default().build(vec![w.shallow_clone()], 0.1).unwrap();
    let mut scaler = GradScaler::new(Device::Cuda(0)).unwrap();
    scaler.backward(&w.sum(Kind::Float)).unwrap();
    let error = scaler.step(&mut opt).unwrap_err().to_string();
    assert!(error.contains("a planted failure half way"), "{error}");
    // The gradients were already unscaled, and another step would unscale them again.
    assert!(matches!(scaler.step(&mut opt), Err(Error::Scaler(ScalerError::UnscaleFailed))));
    assert!(matches!(scaler.update(), Err(Error::Scaler(ScalerError::UnscaleFailed))));
    opt.zero_grad().unwrap();
    scaler.update().unwrap();
}

#[test]
#[cfg_attr(not(debug_assertions), ignore = "faults are planted in debug builds")]
fn gradients_of_a_step_that_fails_midway_are_unusable() {
    if Simulation::find().is_none() {
        return;
    }
    assert!(passes("planted::a_step_fails_half_way", &[("TCH_AMP_PLANTED_FAULT", "half_way")]));
}

#[test]
#[cfg_attr(not(debug_assertions), ignore = "faults are planted in debug builds")]
fn every_planted_fault_is_detected() {
    // The child processes hold the simulation, not this test: each has counters of its own.
    if Simulation::find().is_none() {
        return;
    }
    for (fault, test) in FAULTS {
        let variables = [("TCH_AMP_PLANTED_FAULT", fault), ("SIMULATED_CUDA_LAG", "2")];
        assert!(!passes(test, &variables), "{test} does not detect the fault `{fault}`");
    }
}

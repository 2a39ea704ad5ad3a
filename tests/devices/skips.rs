//! Steps whose outcome is known only on the devices.

use tch::{Cuda, Kind};
use tch_amp::optim::MasterWeights;
use tch_amp::scaler::{GradScalerConfig, StepCounter};

use crate::iteration::{TWO, Training, parameters};
use testkit::optimizers::algorithms;
use testkit::simulation::Simulation;
use testkit::to_f64;

const INF: f64 = f64::INFINITY;

#[test]
fn steps_are_counted_correctly_however_late_the_flags_arrive() {
    let Some(_simulation) = Simulation::find() else { return };
    let mut training = Training::usual(TWO, 1);
    let mut counted = StepCounter::default();
    let (mut taken, mut skipped) = (0, 0);
    for factor in [0.5, INF, 0.5, 0.5, INF, INF, 0.5] {
        counted.record(&training.iterate(factor));
        *if factor == INF { &mut skipped } else { &mut taken } += 1;
        assert!(counted.count().unwrap() <= taken && counted.skipped().unwrap() <= skipped);
    }
    Cuda::synchronize(0);
    assert_eq!((counted.count().unwrap(), counted.skipped().unwrap()), (taken, skipped));
    assert_eq!((taken, skipped, counted.pending()), (4, 3, 0));
}

/// libtorch's kernels compare the flag with 1, which the sum of two set flags is not.
#[test]
fn a_step_that_overflows_on_two_devices_is_skipped_on_both() {
    let Some(_simulation) = Simulation::find() else { return };
    for algorithm in algorithms() {
        for kind in [Kind::Float, Kind::BFloat16] {
            let all = parameters(TWO, kind, 2);
            let before: Vec<_> = all.iter().map(to_f64).collect();
            let mut training = Training::new(algorithm, MasterWeights::None, all, TWO);
            let outcome = training.iterate(INF);
            let after: Vec<_> = training.all.iter().map(to_f64).collect();
            assert_eq!(after, before, "{algorithm:?} {kind:?}");
            assert!(outcome.is_skipped().unwrap(), "{algorithm:?} {kind:?}");
            assert_eq!(training.scaler.get_scale().unwrap(), 4.0, "{algorithm:?} {kind:?}");
        }
    }
}

/// It asks for outcomes that it would not have otherwise, by copies alone.
#[test]
fn the_warning_of_skips_costs_neither_a_launch_nor_a_synchronization() {
    let Some(simulation) = Simulation::find() else { return };
    for factor in [0.5, INF] {
        let counts = [true, false].map(|warn_of_skips| {
            let mut training = Training::usual(TWO, 1);
            let config = GradScalerConfig { warn_of_skips, ..Default::default() };
            training.scaler = config.build(TWO[0]).unwrap();
            let ((), counts) =
                simulation.count(|| (0..30).for_each(|_| drop(training.iterate(factor))));
            (counts.launches, counts.host_syncs)
        });
        assert_eq!(counts[0], counts[1], "{factor}");
        assert_eq!(counts[0].1, 0, "{factor}");
    }
}

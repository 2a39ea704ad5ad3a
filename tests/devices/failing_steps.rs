//! Steps of the fused optimizers in which an allocation fails: they change everything or nothing.

use tch::{Device, Kind, Tensor};
use tch_amp::optim::{AdamW, Algorithm, AmpOptimizer, MasterWeights};
use tch_amp::{GradScaler, Result};

use crate::training::{
    GPUS, MODES, Training, has_numbers_of_each_parameter, scaled, scaler_numbers,
};
use testkit::Case;
use testkit::optimizers::{algorithms, scaler};
use testkit::simulation::Simulation;

const SIZES: [&[i64]; 5] = [&[70], &[3, 5], &[], &[40], &[9]];

/// A training without a step.
fn training(algorithm: Algorithm, mode: (Kind, MasterWeights), devices: &[Device]) -> Training {
    // All steps up to an allocation are taken for each of them.
    let most = if has_numbers_of_each_parameter(&algorithm) { 2 } else { SIZES.len() };
    let sizes: Vec<_> = SIZES[..most].iter().map(|size| size.to_vec()).collect();
    Training::new(algorithm, mode, devices, &sizes)
}

/// A training with gradients, which has taken a step before.
fn trained(algorithm: Algorithm, mode: (Kind, MasterWeights), devices: &[Device]) -> Training {
    let mut training = training(algorithm, mode, devices);
    training.step();
    training.backward();
    training
}

/// A training with gradients that has not taken a step.
fn begun(algorithm: Algorithm, mode: (Kind, MasterWeights), devices: &[Device]) -> Training {
    let mut training = training(algorithm, mode, devices);
    training.backward();
    training
}

/// How a step is taken.
#[derive(Clone, Copy, Debug)]
enum How {
    Plain,
    /// With the scale, the clipping factor and the overflow flag that a scaler may pass.
    Scaled,
}

fn step(training: &mut Training, how: How, numbers: &[Tensor; 3]) -> Result<()> {
    match how {
        How::Plain => training.opt.step(),
        How::Scaled => training.opt.update(&scaled(numbers)),
    }
}

/// The GPUs, with the CPU between them.
const ALL: [Device; 3] = [GPUS[0], Device::Cpu, GPUS[1]];

/// Checks what a step of a training that is `prepared` for it leaves behind when each of its allocations fails.
/// `compare_state` is whether there is state before the step.
fn fail_each(
    simulation: &Simulation,
    prepared: impl Fn() -> Training,
    how: How,
    compare_state: bool,
    context: String,
) {
    let _case = Case(context);
    let numbers = scaler_numbers();
    let mut want = prepared();
    step(&mut want, how, &numbers).unwrap();
    let after = want.values();
    let content =
        |training: &mut Training| (training.values(), compare_state.then(|| training.state()));
    simulation.fail_each(
        || {
            let mut training = prepared();
            let before = content(&mut training);
            (training, before)
        },
        |(training, _)| step(training, how, &numbers),
        |n, (mut training, before), error| {
            assert!(error.is_out_of_memory(), "allocation {n}: {error:?}");
            assert!(content(&mut training) == before, "allocation {n} changed something");
            step(&mut training, how, &numbers).unwrap();
            assert!(training.values() == after, "allocation {n} changed the next step");
            assert!(training.state() == want.state(), "allocation {n} changed the next state");
        },
    );
}

fn for_every_setup(test: impl Fn(Algorithm, (Kind, MasterWeights), &[Device], How, String)) {
    for algorithm in algorithms() {
        for mode in MODES {
            for (devices, how) in [(&GPUS[..1], How::Plain), (&ALL, How::Scaled)] {
                let context = format!("{how:?} {algorithm:?} {mode:?} on {devices:?}");
                test(algorithm, mode, devices, how, context);
            }
        }
    }
}

#[test]
fn a_step_that_runs_out_of_memory_changes_nothing() {
    let Some(simulation) = Simulation::find() else { return };
    for_every_setup(|algorithm, mode, devices, how, context| {
        fail_each(&simulation, || trained(algorithm, mode, devices), how, true, context);
    });
}

#[test]
fn a_first_step_that_runs_out_of_memory_changes_nothing() {
    let Some(simulation) = Simulation::find() else { return };
    for_every_setup(|algorithm, mode, devices, how, context| {
        fail_each(&simulation, || begun(algorithm, mode, devices), how, false, context);
    });
}

/// A scaler first checks the gradients. If an allocation fails there or in the step, the optimizer is unchanged.
#[test]
fn a_scalers_step_that_runs_out_of_memory_leaves_the_optimizer_unchanged() {
    let Some(simulation) = Simulation::find() else { return };
    let some = algorithms().into_iter().skip(1).step_by(3);
    for (algorithm, mode) in some.flat_map(|algorithm| MODES.map(|mode| (algorithm, mode))) {
        for max_norm in [None, Some(0.5)] {
            let take = |training: &mut Training, scaler: &mut GradScaler| match max_norm {
                None => scaler.step(&mut training.opt),
                Some(max) => scaler.step_clip_norm(&mut training.opt, max),
            };
            let new = || {
                let (training, scaler) = (trained(algorithm, mode, &GPUS), scaler(GPUS[0], 4.0));
                drop(scaler.scale(&Tensor::from(1f32).to_device(GPUS[0])).unwrap());
                (training, scaler)
            };
            let _case = Case(format!("{algorithm:?} {mode:?} clipped to {max_norm:?}"));
            let (mut want, mut scaler) = new();
            drop(take(&mut want, &mut scaler).unwrap());
            simulation.fail_each(
                || {
                    let (mut training, scaler) = new();
                    let before = (training.values(), training.state());
                    (training, scaler, before)
                },
                |(training, scaler, _)| take(training, scaler),
                |n, (mut training, mut scaler, before), _| {
                    let now = (training.values(), training.state());
                    assert!(now == before, "allocation {n} changed something");
                    scaler.abandon(&mut training.opt).unwrap();
                    drop(take(&mut training, &mut scaler).unwrap());
                    let (values, state) = (want.values(), want.state());
                    assert!(training.values() == values, "allocation {n} changed the next step");
                    assert!(training.state() == state, "allocation {n} changed the next state");
                },
            );
        }
    }
}

/// Values that are written to a parameter after a failed first step must count, although the step has created state.
#[test]
fn a_failed_first_step_does_not_remember_the_parameters() {
    let Some(simulation) = Simulation::find() else { return };
    for mode in MODES {
        let _case = Case(format!("{mode:?}"));
        simulation.fail_each(
            || begun(AdamW::default().into(), mode, &GPUS),
            |training| training.opt.step(),
            |n, mut training, _| {
                for parameter in &training.parameters {
                    let _filled = tch::no_grad(|| parameter.shallow_clone().fill_(64.0));
                }
                training.opt.step().unwrap();
                for parameter in &training.parameters {
                    let off = (parameter.to_kind(Kind::Double) - 64.0).abs().max();
                    assert!(off.double_value(&[]) < 1.0, "allocation {n}: {off}");
                }
            },
        );
    }
}

#[test]
fn either_all_gradients_become_f32_or_none() {
    let Some(simulation) = Simulation::find() else { return };
    let failures = simulation.fail_each(
        || {
            let training = begun(AdamW::default().into(), MODES[2], &GPUS);
            let before = training.values();
            (training, before)
        },
        |(training, _)| training.opt.accumulate_in_f32(),
        |n, (mut training, before), _| {
            assert!(training.values() == before, "allocation {n}");
            let kinds = training.parameters.iter().map(|parameter| parameter.grad().kind());
            assert!(kinds.into_iter().all(|kind| kind == Kind::BFloat16), "allocation {n}");
            training.opt.accumulate_in_f32().unwrap();
            assert!(training.parameters.iter().all(|p| p.grad().kind() == Kind::Float));
            training.opt.step().unwrap();
        },
    );
    assert!(failures >= 5, "each gradient needs an allocation");
}
